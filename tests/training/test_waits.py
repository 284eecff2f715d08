"""A training step waits only for its gradients, until a log line is due."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.runs import WAYS, lines_of, losses_of, recipe, run_of
from tests.splits import of_lengths
from tests.training.test_schedule import TOKENIZER
from toolkit.config import TrainingSettings
from toolkit.data.tokens import Split
from toolkit.training.optimizer import make_scheduler
from toolkit.training.schedule import make_schedule
from toolkit.training.steps import Steps

SETTINGS = ["--max_steps", "10", "--eval_every", "8", "--global_batch_size", "12", "--per_device_batch_size", "3",
            "--learning_rate", "1e-3"]  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x2", "zero2 x2"])
def test_no_synchronization_between_log_lines(
    way: str, tiny_job: list[str], tmp_path: Path
) -> None:
    finished = recipe(*tiny_job, *SETTINGS, "--logging_steps", "3", "--output_dir", tmp_path / "three", *WAYS[way],
                      script="tests/waits_worker.py", env={"NOTES": str(tmp_path / "notes.json")})  # fmt: skip
    assert finished.code == 0, finished.err[-3000:]
    assert "Warning" not in finished.err
    steps = json.loads((tmp_path / "notes.json").read_text())
    assert len(steps) == 10
    if way == "ddp x2":  # accelerate and DeepSpeed read the norm in each step
        assert [step["clipping"] for step in steps if step["clipping"]] == []
        computing = [sorted(set(step["computing"])) for step in steps]
        del computing[1]  # where DDP arranges its gradients, once
        assert [names for names in computing if names != ["c10d::allreduce_"]] == []
    gathered = {number for number, step in enumerate(steps, 1) if step["logging"]}
    assert gathered == {3, 6, 8, 10}  # 8 is evaluated
    for number in gathered:
        (collective,) = {name for name in steps[number - 1]["logging"] if name.startswith("c10d")}
        assert steps[number - 1]["logging"].count(collective) == 2  # sizes, and numbers
    assert [number for number, step in enumerate(steps, 1) if step["after"]] == [8, 10]
    run_of([*tiny_job, *SETTINGS], tmp_path / "one")
    assert losses_of(tmp_path / "three") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)
    for mine, theirs in zip(
        *(lines_of(tmp_path / run / "metrics.jsonl") for run in ("three", "one")), strict=True
    ):
        for name in ("step", "epoch", "learning_rate", "samples", "tokens"):
            assert mine[name] == theirs[name]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_pending_steps_are_logged_before_an_error(tiny_job: list[str], tmp_path: Path) -> None:
    finished = recipe(*tiny_job, *SETTINGS, "--learning_rate", "1e30", "--lr_scheduler_type", "constant",
                      "--logging_steps", "9", "--output_dir", tmp_path / "run")  # fmt: skip
    assert finished.code == 1
    (line,) = finished.error_lines
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert lines
    assert [each["step"] for each in lines] == list(range(1, len(lines) + 1))
    assert all(each["loss"] is not None for each in lines)
    assert f"error: step {len(lines) + 1}: the loss of rows" in line


def steps_of(accelerator: Accelerator, split: Split, settings: TrainingSettings) -> Steps:
    """Of a model that computes nothing."""
    model = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    schedule = make_schedule(settings, split)
    scheduler = make_scheduler(optimizer, settings, schedule.total_steps)
    return Steps(accelerator, split, TOKENIZER, settings, schedule, model, optimizer, scheduler)


def test_a_step_allocates_nothing_of_the_size_of_the_data(accelerator: Accelerator) -> None:
    """An array over all samples would take 8 bytes for each."""
    samples, settings = 1_000_000, TrainingSettings(max_steps=6)
    steps = steps_of(accelerator, of_lengths(np.full(samples, 3)), settings)
    allocated = []
    for step in steps:
        for _ in step.micro_batches(steps.model):
            pass
        if tracemalloc.is_tracing():
            allocated.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
        else:
            tracemalloc.start()
    tracemalloc.stop()
    assert len(allocated) == 5
    assert max(allocated) < samples
