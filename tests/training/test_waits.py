"""A training step waits only for its gradients, until a log line is due. (Promise 6.)"""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.runs import WAYS, assert_same_run, lines_of, recipe, run_of
from tests.splits import of_lengths
from toolkit.config import TrainingSettings
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
    three = tmp_path / "three"
    words = [*tiny_job, *SETTINGS, "--logging_steps", "3", "--output_dir", three, *WAYS[way]]
    env = {"NOTES": str(tmp_path / "notes.json")}
    assert "Warning" not in recipe(*words, script="tests/waits_worker.py", env=env).succeeded().err
    steps = json.loads((tmp_path / "notes.json").read_text())
    assert len(steps) == 10
    if way == "ddp x2":  # accelerate and DeepSpeed read the norm in each step
        assert [step["clipping"] for step in steps if step["clipping"]] == []
        computing = [set(step["computing"]) for step in steps]
        del computing[1]  # where DDP arranges its gradients, once
        assert computing == [{"c10d::allreduce_"}] * 9
    gathered = {number for number, step in enumerate(steps, 1) if step["logging"]}
    assert gathered == {3, 6, 8, 10}  # 8 is evaluated
    for number in gathered:
        waits = [name for name in steps[number - 1]["logging"] if name.startswith("c10d")]
        assert len(waits) == 1
    assert [number for number, step in enumerate(steps, 1) if step["after"]] == [8, 10]
    one = run_of([*tiny_job, *SETTINGS], tmp_path / "one")
    assert_same_run(three, one)
    for mine, theirs in zip(
        *(lines_of(run / "metrics.jsonl") for run in (three, one)), strict=True
    ):
        for name in ("epoch", "learning_rate", "samples", "tokens"):
            assert mine[name] == theirs[name]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_pending_steps_are_logged_before_an_error(tiny_job: list[str], tmp_path: Path) -> None:
    rates = ["--learning_rate", "1e30", "--lr_scheduler_type", "constant", "--logging_steps", "9"]
    finished = recipe(*tiny_job, *SETTINGS, *rates, "--output_dir", tmp_path / "run")
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
    schedule = make_schedule(settings, split, 1)
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
