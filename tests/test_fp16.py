"""fp16: schedule, optimizer and average skip a step whose gradient overflows, also in a resumed run."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import get_scheduler

from tests.faults import refusal
from tests.fp16_jobs import IN_A_SHARD, IN_THE_LOSS, SCALE
from tests.jobs_worker import run_jobs
from tests.runs import WAYS, lines_of, losses_of
from toolkit.checkpoint import folder as folders
from toolkit.training.loop_checks import LoopChecks
from toolkit.training.steps import Step

STEPS, SAVED_AT, WARMUP, RATE = 10, 3, 4, 1e-3
SKIPPED = (IN_THE_LOSS, IN_A_SHARD)


def jobs(folder: Path, model: Path, reviews: Path) -> list[list[Any]]:
    """A run, and one that resumes from its checkpoint after the first skipped step."""
    settings = ["tests.fp16_jobs", "--model_name_or_path", model, "--train_file", reviews, "--mixed_precision", "fp16",
                "--max_steps", STEPS, "--eval_every", STEPS, "--checkpoint_every", SAVED_AT, "--keep_checkpoints", 9,
                "--global_batch_size", 12, "--per_device_batch_size", 3, "--learning_rate", RATE, "--warmup_steps",
                WARMUP, "--dropout", 0, "--ema_decay", 0.9, "--report_to", "none"]  # fmt: skip
    saved = folders.step_folder(folder / "whole" / "checkpoints", SAVED_AT)
    return [[*settings, "--output_dir", folder / "whole"],
            [*settings, "--output_dir", folder / "resumed", "--resume", saved]]  # fmt: skip


def run(way: str, folder: Path, model: Path, reviews: Path) -> Path:
    log = run_jobs(folder, WAYS[way], jobs(folder, model, reviews)).err
    assert "optimizer.step()" not in log  # a warning of torch's
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> Path:
    return run("single", tmp_path_factory.mktemp("fp16"), tiny_model, reviews)


def learning_rates() -> list[float]:
    """By `transformers`, for a schedule that does not step where an update is skipped."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS)
    rates = []
    for step in range(1, STEPS + 1):
        rates.append(scheduler.get_last_lr()[0])
        if step not in SKIPPED:
            optimizer.step()
            scheduler.step()
    return rates


def last(run: Path) -> Path:
    return folders.step_folder(run / "checkpoints", STEPS)


def tensors(checkpoint: Path, key: str) -> dict[str, torch.Tensor]:
    if key == "weight":
        return load_file(checkpoint / folders.WEIGHTS_FILE)
    stored = load_file(checkpoint / folders.OPTIMIZER_FILE)
    return {name.partition(".")[2]: each for name, each in stored.items() if name.startswith(f"{key}.")}


def assert_skipped(folder: Path, single: Path) -> None:
    """In both runs, by the schedule, the optimizer, the average and the scale, as in one process."""
    for name, first in (("whole", 0), ("resumed", SAVED_AT)):
        lines = lines_of(folder / name / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(first + 1, STEPS + 1))
        assert [line["step"] for line in lines if line["grad_norm"] is None] == [s for s in SKIPPED if s > first]
        assert [line["learning_rate"] for line in lines] == pytest.approx(learning_rates()[first:])
        assert losses_of(folder / name) == pytest.approx(losses_of(single / "whole")[first:], rel=5e-3)
        checkpoint = last(folder / name)
        state = folders.read_state(checkpoint)
        updates = STEPS - len(SKIPPED)
        assert (state["step"], state["scheduler_steps"]) == (STEPS, updates)
        assert state["loss_scale"]["cur_scale"] == SCALE / 2 ** len(SKIPPED)
        assert {float(count) for count in tensors(checkpoint, "step").values()} == {updates}
        for key in ("weight", "ema"):
            expected = tensors(last(single / "whole"), key)
            for parameter, values in tensors(checkpoint, key).items():
                torch.testing.assert_close(values, expected[parameter], rtol=0, atol=updates * RATE / 4)


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "single" else pytest.mark.multiprocess)
                                 for way in WAYS if way != "ddp x3"])  # fmt: skip
def test_skipped_steps_are_not_counted(way: str, single: Path, tmp_path: Path, tiny_model: Path, reviews: Path) -> None:
    folder = single if way == "single" else run(way, tmp_path, tiny_model, reviews)
    assert_skipped(folder, single)


@pytest.mark.multiprocess
def test_the_step_in_which_the_scale_grows(tmp_path: Path, tiny_model: Path, reviews: Path) -> None:
    """DeepSpeed 0.19.8 halves its gradient."""
    settings = ["--model_name_or_path", tiny_model, "--train_file", reviews, "--max_steps", 6, "--optimizer", "sgd",
                "--eval_every", 6, "--global_batch_size", 12, "--per_device_batch_size", 3, "--learning_rate", 0.5,
                "--lr_scheduler_type", "constant", "--max_grad_norm", 0, "--dropout", 0,
                "--report_to", "none"]  # fmt: skip
    exact = tmp_path / "exact"
    for way in ("single", "zero2 x2", "zero3 x2"):
        run = tmp_path / way / "run"
        jobs = [["tests.fp16_growth_jobs", *settings, "--mixed_precision", "fp16", "--output_dir", run]]
        if way == "single":
            jobs.append(["recipes.cls", *settings, "--mixed_precision", "no", "--output_dir", exact])
        run_jobs(run.parent, WAYS[way], jobs)
        for name in ("loss", "grad_norm"):
            mine, expected = ([line[name] for line in lines_of(each / "metrics.jsonl")] for each in (run, exact))
            assert mine == pytest.approx(expected, rel=0.02), (way, name)


@pytest.mark.parametrize(("precision", "most"), [("fp16", 15), ("bf16", 0)])
def test_a_gradient_that_stays_infinite_ends_the_run(precision: str, most: int) -> None:
    """After 16 skipped steps the scale is 1, so the scale is not the cause."""
    accelerator: Any = SimpleNamespace(mixed_precision=precision)
    steps: Any = SimpleNamespace(skipped=0, collate=None, accelerator=accelerator, checks=LoopChecks(accelerator))
    step = Step(steps, 1, np.arange(2), 2, 2.0, steps.collate, _losses=[torch.ones(2)], _ids=[torch.arange(2)])
    step.grad_norm = math.inf
    step.metrics = SimpleNamespace(step=1, loss=0.7, grad_norm=math.inf, learning_rate=1e-3)  # type: ignore[assignment]
    for _ in range(most):
        step.refuse_non_finite()
    refusal(step.refuse_non_finite, match="step 1: the gradient is not finite.*mixed_precision")
