"""Steps leave no tensor on the CPU and do not synchronize: checked on torch's `meta` device, without a GPU.

    python tests/test_meta_device.py JOBS.json NOTES.json

runs recipes on the device: steps, a log line, an evaluation's first batch. JOBS.json: name -> [module, words...].
NOTES.json: name -> {"error": traceback, "computing": [...], "evaluating": [...]}, the operators in each part that mix
tensors of the CPU and the device, or copy numbers to the device. What synchronizes with a GPU (`.item()`, `.cpu()`,
`bool()`, `nonzero`) raises on `meta`.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import toolkit
from tests.matrix import JOBS, SPARSE, Job, words_of
from tests.runs import recipe
from toolkit import launch
from toolkit.features import pretraining, spans, titles
from toolkit.features.padding_free import attention as padding_free
from toolkit.features.titles.evaluation import Writer
from toolkit.run import Run
from toolkit.training import steps
from toolkit.training.steps import Step, Steps

DEVICE = torch.device("meta")
# each kind of micro-batch: a run's first, a step's last, those of a later step; `meta` has no fused AdamW
META = ["--max_steps", 2, "--eval_every", 2, "--logging_steps", 2, "--global_batch_size", 5, "--per_device_batch_size",
        3, "--mixed_precision", "no", "--optimizer_args", "fused=False"]  # fmt: skip
NAMES = ("few", "two terms", "weights", "lora recomputed", "pos_weight", "regression", "layer decay",
         "padding-free two terms", "sampling", "long", "long recomputed", "title", "pretraining",
         "spans")  # fmt: skip
TRACED = {
    **{name: JOBS[name] for name in NAMES},
    "flex": Job("recipes.bigbird", [*SPARSE, "--attn_implementation", "flex"]),
    "full": Job("recipes.bigbird", [*SPARSE, "--attn_implementation", "full"]),
    "unclipped": Job("recipes.cls", [*JOBS["frozen layer"].words, "--max_grad_norm", 0]),
    "long averaged": Job("recipes.bigbird", [*SPARSE, "--fgm_epsilon", 0.5, "--ema_decay", 0.9]),
    "title recomputed": Job("recipes.title", [*JOBS["title"].words, "--gradient_checkpointing"]),
}


@pytest.fixture(scope="module")
def notes(tmp_path_factory: Any) -> dict[str, Any]:
    folder, commands = tmp_path_factory.mktemp("meta"), {}
    jobs, notes = folder / "jobs.json", folder / "notes.json"
    for name, job in TRACED.items():
        commands[name] = words_of([job.recipe, *job.words, *META, "--output_dir", folder / name])
    jobs.write_text(json.dumps(commands), encoding="utf-8")
    recipe(jobs, notes, script="tests/test_meta_device.py", seconds=500).succeeded()
    return dict(json.loads(notes.read_text(encoding="utf-8")))


@pytest.mark.parametrize("job", TRACED)
def test_a_step_and_an_evaluation_stay_on_the_device(job: str, notes: dict[str, Any]) -> None:
    assert notes[job] == {"error": "", "computing": [], "evaluating": []}, notes[job]["error"]


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

    def note(self, name: str) -> None:
        where = _caller()
        # log lines and batches may copy; BigBird's tables are copied once per pattern
        if self.part in self.notes and not where.startswith(("batches.py:", "plan.py:")):
            self.notes[self.part].append(f"{name} in {where}")

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        read = _tensors((arguments, options))
        uses_device = any(each.device == DEVICE for each in [*read, *_tensors(result)])
        # a single number on the CPU is a kernel's argument, unless it is copied
        is_copy = "copy" in function.name()
        on_cpu = [each for each in read if each.device.type == "cpu" and (each.dim() or is_copy)]
        if uses_device and on_cpu:
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
        copies = function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
        if copies and result.device == DEVICE:
            self.crossings.note(function.__name__)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and "/site-packages/torch/" not in frame.filename:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def accelerator_on_device(*arguments: Any) -> Accelerator:
    accelerator = make_accelerator(*arguments)
    accelerator.device_placement = False  # the model is on the device already
    # new AcceleratorStates copy PartialState
    accelerator.state.device = PartialState().device = DEVICE
    return accelerator


def sums_on_device(step: Step) -> dict[str, float]:
    """For log lines: ones."""
    assert {each.device for values in step._values.values() for each in values} == {DEVICE}
    return dict.fromkeys(step._values, 1.0)


def gather_and_end(accelerator: Accelerator, outputs: tuple[torch.Tensor, ...]) -> Any:
    assert {each.device for each in outputs} == {DEVICE}
    raise Traced


def no_titles(writer: Writer, encoded: dict[str, Any]) -> torch.Tensor:
    mask = encoded["attention_mask"]
    return mask.new_zeros(len(mask), writer.max_new_tokens)


def trace(module: str, words: list[str]) -> dict[str, Any]:
    crossings, sys.argv = Crossings(), [f"{module}.py", *words]

    def steps_noted(steps: Steps) -> Iterator[Any]:
        with crossings, Copies(crossings):
            for step in begin(steps):
                crossings.part = "computing"
                yield step

    def log_noted(run: Run, finished: Any) -> None:
        crossings.part = "logging"
        log(run, finished)
        crossings.part = "evaluating"

    Steps.__iter__, Run._log_steps = steps_noted, log_noted
    error = "no evaluation"
    try:
        importlib.import_module(module).main()
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
    Run._try_evaluation = lambda *_: None
    Accelerator.gather_for_metrics = gather_and_end
    Step.sums, steps.norm_of = sums_on_device, lambda norm: 1.0
    padding_free.check_logits = lambda *words: None  # it compares numbers
    allow_flex_attention()
    # beam search synchronizes after each token
    Writer.write = no_titles
    loaders: dict[Any, str] = {toolkit: "load_classifier", titles: "load_title_model"}
    loaders |= {pretraining: "load_masked_model", spans: "load_tagger"}
    for package, name in loaders.items():
        load = getattr(package, name)
        vars(package)[name] = lambda *words, load=load: load(*words).to(DEVICE)
    jobs, path = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    notes = {name: trace(module, words) for name, (module, *words) in jobs.items()}
    path.write_text(json.dumps(notes), encoding="utf-8")


if __name__ == "__main__":
    main()
