"""A training step waits only for its gradients, until a log line is due.

It is a job of tests/matrix.py, too (`main`): recipes/cls.py, which notes what a process waits for. In the run's folder
notes.jsonl has a line per step: part of the step ("computing", "clipping", "logging", "after") -> the collectives and
the numbers read by the host, each as [operator, the bytes that a ring sends from one rank].
"""

import json
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from recipes import cls
from tests import inputs
from tests.matrix import TINY, runs, words_of
from tests.runs import assert_same_run, lines_of, recipe
from tests.splits import of_lengths
from toolkit.config import TrainingSettings
from toolkit.launch.accelerator import Accelerator
from toolkit.training.optimizer import make_scheduler
from toolkit.training.schedule import make_schedule
from toolkit.training.steps import Steps

SETTINGS = [*TINY, "--train_file", inputs.reviews, "--max_steps", 10, "--eval_every", 8, "--global_batch_size", 12,
            "--per_device_batch_size", 3, "--learning_rate", "1e-3"]  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x2", "zero2 x2"])
def test_no_synchronization_between_log_lines(way: str) -> None:
    run = runs(way).run("waits", "tests.training.test_waits", [*SETTINGS, "--logging_steps", 3])
    assert "Warning" not in runs(way).log("waits")
    notes = lines_of(run / "notes.jsonl")
    steps = [{part: [name for name, _ in some] for part, some in note.items()} for note in notes]
    assert len(steps) == 10
    if way == "ddp x2":  # accelerate and DeepSpeed read the norm in each step
        assert [step["clipping"] for step in steps if step["clipping"]] == []
        computing = [set(step["computing"]) for step in steps]
        del computing[1]  # where DDP arranges its gradients, once
        assert computing == [{"c10d::allreduce_"}] * 9
    gathered = {number for number, step in enumerate(steps, 1) if step["logging"]}
    assert gathered == {3, 6, 8, 10}  # 8 is evaluated
    for number in gathered:
        (collective,) = {name for name in steps[number - 1]["logging"] if name.startswith("c10d")}
        assert steps[number - 1]["logging"].count(collective) == 2  # sizes, and numbers
    assert [number for number, step in enumerate(steps, 1) if step["after"]] == [8, 10]
    assert_same_run(run, runs("single").run("logs each step", "recipes.cls", SETTINGS))


def test_pending_steps_are_logged_before_an_error(tmp_path: Path) -> None:
    finished = recipe(*words_of(SETTINGS), "--learning_rate", "1e30", "--lr_scheduler_type", "constant",
                      "--logging_steps", "9", "--output_dir", tmp_path / "run")  # fmt: skip
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [each["step"] for each in lines] == [*range(1, len(lines) + 1)] != []
    assert all(each["loss"] is not None for each in lines)
    finished.says_in_one_line(f"error: step {len(lines) + 1}: the loss of rows")


def test_a_step_allocates_nothing_of_the_size_of_the_data(accelerator: Accelerator) -> None:
    """An array over all samples would take 8 bytes for each. The model computes nothing."""
    samples, settings = 1_000_000, TrainingSettings(max_steps=6)
    split = of_lengths(np.full(samples, 3))
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    schedule = make_schedule(settings, split)
    scheduler = make_scheduler(optimizer, settings, schedule.total_steps)
    tokenizer = SimpleNamespace(pad_token_id=0, padding_side="right")
    steps = Steps(accelerator, split, tokenizer, settings, schedule, model, optimizer, scheduler)
    allocated = []
    for step in steps:
        for _ in step.micro_batches(model):
            pass
        if tracemalloc.is_tracing():
            allocated.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
        else:
            tracemalloc.start()
    tracemalloc.stop()
    assert len(allocated) == 5
    assert max(allocated) < samples


class Waits(TorchDispatchMode):
    noted: list[tuple[str, int]]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.name()
        if name.startswith("c10d::"):
            self.noted.append((name, sent_bytes(name, arguments)))
        elif "local_scalar_dense" in name:
            self.noted.append((name, 0))
        return function(*arguments, **(options or {}))


def sent_bytes(name: str, arguments: Any) -> int:
    """From one rank of a ring (Patarasu and Yuan 2009)."""
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
    sizes = [tensor.nbytes for tensor in tensors]
    whole = max(sizes, default=0) if "gather" in name or "scatter" in name else sum(sizes)
    world = torch.distributed.get_world_size()
    return int(whole * (world - 1) / world * (2 if "allreduce" in name else 1))


def main() -> None:
    notes: list[dict[str, list[tuple[str, int]]]] = []
    waits = Waits()
    begin, finish, clip = Steps.__iter__, Steps.finish, Accelerator.clip_grad_norm_

    def noting_begin(steps: Steps) -> Iterator[Any]:
        with waits:
            for step in begin(steps):
                notes.append({"computing": [], "clipping": [], "logging": [], "after": []})
                waits.noted = notes[-1]["computing"]
                yield step

    def noting_clip(*arguments: Any) -> Any:
        waits.noted = notes[-1]["clipping"]
        norm = clip(*arguments)
        waits.noted = notes[-1]["computing"]
        return norm

    def noting_finish(steps: Steps, step: Any) -> Iterator[Any]:
        waits.noted = notes[-1]["logging"]
        yield from finish(steps, step)
        waits.noted = notes[-1]["after"]

    with (
        mock.patch.object(Steps, "__iter__", noting_begin),
        mock.patch.object(Steps, "finish", noting_finish),
        mock.patch.object(Accelerator, "clip_grad_norm_", noting_clip),
        # as on a GPU, where a mask is not looked at
        mock.patch.object(masking_utils, "_ignore_bidirectional_mask_sdpa", return_value=False),
    ):
        cls.main()
    if torch.distributed.get_rank() == 0:
        path = Path(sys.argv[sys.argv.index("--output_dir") + 1]) / "notes.jsonl"
        path.write_text("".join(json.dumps(note) + "\n" for note in notes))
