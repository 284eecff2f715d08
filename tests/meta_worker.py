"""Runs recipes on torch's `meta` device in place of a GPU: steps, a log line, an evaluation's first batch.

    python tests/meta_worker.py JOBS.json NOTES.json

JOBS.json: name -> [module, words...]. NOTES.json: name -> {"error": traceback, "computing": [...], "evaluating":
[...]}, the operators in each part that mix tensors of the CPU and the device, or copy numbers to the device. What
synchronizes with a GPU (`.item()`, `.cpu()`, `bool()`, `nonzero`) raises on `meta`.
"""

import contextlib
import importlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import toolkit
from toolkit import launch
from toolkit.features import pretraining, titles
from toolkit.features.distillation import teacher
from toolkit.features.padding_free import attention as padding_free
from toolkit.features.padding_free.collator import PackedCollator
from toolkit.features.titles.evaluation import Writer
from toolkit.run import Run
from toolkit.training import steps
from toolkit.training.steps import Step, Steps

DEVICE = torch.device("meta")
MODE: Any = contextlib.nullcontext()
"""Active while the device computes."""
make_accelerator, begin = launch.make_accelerator, Steps.__iter__
log = Run._log_steps


class Traced(BaseException):
    """Raised after the evaluation's first batch."""


class Crossings(TorchDispatchMode):
    """Notes operators on the device that read a CPU tensor of more than one number, or copy one to it."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, list[str]] = {"computing": [], "evaluating": []}
        self.part = "computing"
        self.copies = Copies(self)

    def __enter__(self) -> Self:
        self.copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.copies.__exit__(*error)

    def note(self, name: str) -> None:
        where = _caller()
        # log lines and batches may copy; BigBird's tables are copied once per pattern
        if self.part in self.notes and not where.startswith(("batches.py:", "plan.py:")):
            self.notes[self.part].append(f"{name} in {where}")

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        read = [
            each for each in tree_leaves((arguments, options)) if isinstance(each, torch.Tensor)
        ]
        tensors = [*read, *(each for each in tree_leaves(result) if isinstance(each, torch.Tensor))]
        if any(each.device == DEVICE for each in tensors) and any(
            _on_cpu(each, function) for each in read
        ):
            self.note(function.name())
        return result


class Copies(TorchFunctionMode):
    """Notes tensors made from numbers: a copy on a GPU, but not an operator on `meta`."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self.crossings = crossings

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        if (
            function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
            and result.device == DEVICE
        ):
            self.crossings.note(function.__name__)
        return result


def _on_cpu(tensor: torch.Tensor, function: Any) -> bool:
    """A single number on the CPU is a kernel's argument, unless it is copied."""
    return tensor.device.type == "cpu" and (tensor.dim() > 0 or "copy" in function.name())


def _caller() -> str:
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    frame = next(
        frame for frame in reversed(frames) if "/site-packages/torch/" not in frame.filename
    )
    return f"{Path(frame.filename).name}:{frame.lineno}"


def accelerator_on_device(*arguments: Any) -> Accelerator:
    # the model is on the device already
    accelerator = make_accelerator(*arguments)
    accelerator.device_placement = False
    move_to(DEVICE, accelerator)
    return accelerator


def move_to(device: torch.device, accelerator: Accelerator) -> None:
    # new AcceleratorStates copy PartialState
    accelerator.state.device = PartialState().device = device


def on_cpu(compute: Any) -> Any:
    """For computations before training that need numbers: a teacher's logits."""

    def compute_on_cpu(accelerator: Accelerator, *arguments: Any) -> Any:
        move_to(torch.device("cpu"), accelerator)
        result = compute(accelerator, *arguments)
        move_to(DEVICE, accelerator)
        return result

    return compute_on_cpu


def sums_on_device(step: Step) -> dict[str, float]:
    """For log lines: ones."""
    assert {each.device for values in step._values.values() for each in values} == {DEVICE}
    return dict.fromkeys(step._values, 1.0)


def to_device(model: torch.nn.Module) -> torch.nn.Module:
    return model.to(DEVICE)


def on_device(load: Any) -> Any:
    return lambda *words: to_device(load(*words))


def in_mode(function: Any) -> Any:
    def call(*words: Any) -> Any:
        with MODE:
            return function(*words)

    return call


def trace(module: str, words: list[str | float]) -> dict[str, Any]:
    recipe, crossings, sys.argv = (
        importlib.import_module(module),
        Crossings(),
        [f"{module}.py", *map(str, words)],
    )

    def steps_noted(steps: Steps) -> Iterator[Any]:
        with MODE, crossings:
            for step in begin(steps):
                crossings.part = "computing"
                yield step

    def log_noted(run: Run, finished: Any) -> None:
        crossings.part = "logging"
        log(run, finished)
        crossings.part = "evaluating"

    def gather_or_end(accelerator: Accelerator, outputs: tuple[torch.Tensor, ...]) -> Any:
        if accelerator.device.type == "cpu":
            return outputs
        assert {each.device for each in outputs} == {DEVICE}
        raise Traced

    Steps.__iter__, Run._log_steps = steps_noted, log_noted  # type: ignore[method-assign]
    Run._try_evaluation = lambda *_: None  # type: ignore[method-assign]
    Accelerator.gather_for_metrics = gather_or_end
    Step.sums, steps.norm_of = sums_on_device, lambda norm: 1.0  # type: ignore[method-assign]
    error = "no evaluation"
    try:
        recipe.main()
    except Traced:
        error = ""
    except Exception:
        error = traceback.format_exc()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return {"error": error, **crossings.notes}


def allow_flex_attention() -> None:
    """It rejects devices without a kernel, and needs an implementation for each mode; here its formula runs."""
    torch.compiler.set_stance("force_eager")
    flex._validate_device = lambda *tensors: None
    for operator in (flex_attention, flex_attention_backward):
        operator.py_impl(Crossings)(lambda mode, *words, run=operator: run(*words))


def main() -> None:
    launch.make_accelerator = accelerator_on_device
    padding_free.check_logits = lambda *words: None  # it compares numbers
    PackedCollator.prepare_model = in_mode(PackedCollator.prepare_model)  # type: ignore[method-assign]
    allow_flex_attention()
    # beam search synchronizes after each token
    Writer.write = lambda writer, encoded, mask: mask.new_zeros(len(mask), writer.max_new_tokens)  # type: ignore[method-assign]
    vars(toolkit)["load_classifier"] = on_device(toolkit.load_classifier)
    for package, load in ((titles, "load_title_model"), (pretraining, "load_masked_model")):
        vars(package)[load] = on_device(getattr(package, load))
    teacher.add_teacher_logits = on_cpu(teacher.add_teacher_logits)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    path = Path(sys.argv[2])
    path.write_text(
        json.dumps({job: trace(*words[:1], words[1:]) for job, words in jobs.items()}),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
