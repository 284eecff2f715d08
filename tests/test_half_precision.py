"""Promise 1 in bf16 and fp16: the gradient of a step is as near to fp32's under every strategy as in one process.

A step of fp16 whose gradient overflows is skipped by the schedule, the optimizer and the average, also in a resumed
run.

It is a job of tests/matrix.py, too: `main` runs recipes/cls.py in fp16, the first word says with what.

overflows: gradients that overflow in two steps, on one process only. At the end the loss scale and the optimizer's
           updates are written to OUTPUT_DIR/fp16.json.
grows:     a loss scale that grows in every second step.
"""

import contextlib
import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from recipes import cls
from tests.faults import refusal
from tests.matrix import PAIRS, REVIEWS, WAYS, runs
from tests.runs import lines_of, losses_of, slow_but
from toolkit.launch.accelerator import Accelerator
from toolkit.run import Run
from toolkit.training.precision import set_scaler
from toolkit.training.steps import Step, Steps

COMMON = [*REVIEWS, "--global_batch_size", 48, "--weight_decay", 0]
# A step of SGD with a learning rate of 1 moves the weights by the gradient.
GRADIENT = ["--optimizer", "sgd", "--learning_rate", 1, "--max_steps", 1, "--eval_every", 1, "--max_grad_norm", 0,
            "--lr_scheduler_type", "constant"]  # fmt: skip
STILL = [*GRADIENT, "--learning_rate", "1e-20"]
CURVE = ["--max_steps", 8, "--eval_every", 8, "--learning_rate", "2e-3", "--warmup_ratio", 0.25]
# name -> (settings, micro-batches of a step)
JOBS: dict[str, tuple[list[Any], int]] = {
    "gradient in 4": (GRADIENT, 4),
    "gradient in 16": (GRADIENT, 16),
    "curve": (CURVE, 4),
    "still": (STILL, 1),
}


def run_of(way: str, precision: str, name: str) -> Path:
    words, micro_batches = JOBS[name]
    per_device = -(-48 // runs(way).processes // micro_batches)
    job = [*COMMON, *words, "--mixed_precision", precision, "--per_device_batch_size", per_device]
    return runs(way).run(f"{precision} {name}", "recipes.cls", job)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return lines_of(run / "metrics.jsonl")


def weights_of(run: Path) -> torch.Tensor:  # (N,) float64
    weights = load_file(run / "model" / "model.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights)]).double()


def gradient_error(run: Path, expected: Path, start: Path) -> float:
    """Relative error of the gradient of a run of one step; `start`: a run whose weights have not moved."""
    begin = weights_of(start)
    gradient, exact_gradient = weights_of(run) - begin, weights_of(expected) - begin
    return float((gradient - exact_gradient).norm() / exact_gradient.norm())


def error_of(way: str, precision: str, name: str) -> float:
    """Compared with fp32 in one process."""
    expected, start = (run_of("single", "no", each) for each in (name, "still"))
    return gradient_error(run_of(way, precision, name), expected, start)


@pytest.mark.parametrize("way", slow_but(WAYS[1:], *WAYS[1:6]))
def test_bf16(way: str) -> None:
    for name in ("gradient in 4", "gradient in 16"):
        assert 1e-5 < error_of(way, "bf16", name) < 1.5 * error_of("single", "bf16", name), name
    expected = np.array(losses_of(run_of("single", "no", "curve")))
    curves = [losses_of(run_of(each, "bf16", "curve")) for each in ("single", way)]
    one, many = (np.abs(curve / expected - 1).max() for curve in curves)
    assert 0 < many < 1.5 * one


@pytest.mark.parametrize("way", slow_but(WAYS[1:], "ddp x2", "zero2 x2", "zero3 x2", "fsdp2 x2"))
def test_fp16(way: str) -> None:
    for name in ("gradient in 4", "gradient in 16"):
        # the division into micro-batches makes it 1.7 times as large under DDP with three processes
        most = 2.5 * error_of("single", "fp16", name)
        assert 1e-6 < error_of(way, "fp16", name) < most < 0.01, name
    curves = [losses_of(run_of(each, "fp16", "curve")) for each in (way, "single")]
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)


@pytest.mark.parametrize("way", ["single", "zero3 x2"])
def test_padding_free_in_bf16(way: str) -> None:
    """Its attention has other kernels."""
    words = [*PAIRS, "--padding_free", "true", "--mixed_precision", "bf16"]
    run = runs(way).run("bf16 padding-free", "recipes.cls", words)
    assert losses_of(run) == pytest.approx(losses_of(runs("single")["pairs"]), rel=0.03)


# Skipped steps: `main` makes two gradients overflow on one process only.
STEPS, SAVED_AT, WARMUP, RATE = 10, 3, 4, 1e-3
SKIPPED = IN_THE_LOSS, IN_A_SHARD = 2, 5
SCALE = 1024.0  # low enough for no other overflow
FP16 = ["overflows", *REVIEWS, "--mixed_precision", "fp16", "--max_steps", STEPS]
FP16 += ["--eval_every", STEPS, "--checkpoint_every", SAVED_AT, "--keep_checkpoints", 9]
FP16 += ["--learning_rate", RATE, "--warmup_steps", WARMUP, "--ema_decay", 0.9]
FP16 += ["--per_device_batch_size", 3]


def learning_rates() -> list[float]:
    """Linear, of a schedule that does not step where an update is skipped."""
    rates, updates = [], 0
    for step in range(1, STEPS + 1):
        rates.append(RATE * min(updates / WARMUP, (STEPS - updates) / (STEPS - WARMUP)))
        updates += step not in SKIPPED
    return rates


def saved_before_a_skip(whole: Path) -> Path:
    return whole / "checkpoints" / f"step-{SAVED_AT:08d}"


def assert_skipped(run: Path, expected: Path, first: int) -> None:
    """By the schedule, the optimizer, the average and the scale, in a run that began after step `first`."""
    updates = STEPS - len(SKIPPED)
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == list(range(first + 1, STEPS + 1))
    skipped = [line["step"] for line in lines if line["grad_norm"] is None]
    assert skipped == [step for step in SKIPPED if step > first]
    assert [line["learning_rate"] for line in lines] == pytest.approx(learning_rates()[first:])
    assert losses_of(run) == pytest.approx(losses_of(expected)[first:], rel=5e-3)
    state = json.loads((run / "fp16.json").read_text())
    assert state == {"scale": SCALE / 2 ** len(SKIPPED), "updates": [updates]}
    average = load_file(expected / "model" / "model.safetensors")
    for name, values in load_file(run / "model" / "model.safetensors").items():
        torch.testing.assert_close(values, average[name], rtol=0, atol=updates * RATE / 4)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ddp x3"])
def test_skipped_steps_are_not_counted(way: str) -> None:
    """In a whole run and in one that is resumed after the first skipped step."""
    expected = runs("single").run("fp16 skips", "tests.test_half_precision", FP16)
    whole = runs(way).run("fp16 skips", "tests.test_half_precision", FP16)
    words = [*FP16, "--resume", saved_before_a_skip(whole)]
    resumed = runs(way).run("fp16 resumed", "tests.test_half_precision", words)
    assert "optimizer.step()" not in runs(way).log("fp16 skips")  # a warning of torch's
    assert_skipped(whole, expected, 0)
    assert_skipped(resumed, expected, SAVED_AT)


@pytest.mark.parametrize("way", ["single", "zero2 x2", "zero3 x2"])
def test_the_step_in_which_the_scale_grows(way: str) -> None:
    """DeepSpeed 0.19.8 halves its gradient."""
    settings = [*COMMON, "--max_steps", 6, "--optimizer", "sgd", "--eval_every", 6, "--global_batch_size", 12,
                "--per_device_batch_size", 3, "--learning_rate", 0.5, "--lr_scheduler_type", "constant",
                "--max_grad_norm", 0]  # fmt: skip
    exact_run = runs("single").run("growth", "recipes.cls", [*settings, "--mixed_precision", "no"])
    words = ["grows", *settings, "--mixed_precision", "fp16"]
    run = runs(way).run("fp16 growth", "tests.test_half_precision", words)
    for line, expected in zip(*map(metrics_of, (run, exact_run)), strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=0.02), name


@pytest.mark.parametrize(("precision", "most"), [("fp16", 15), ("bf16", 0)])
def test_a_gradient_that_stays_infinite_ends_the_run(precision: str, most: int) -> None:
    """After 16 skipped steps the scale is 1, so the scale is not the cause."""
    accelerator = SimpleNamespace(mixed_precision=precision)
    steps: Any = SimpleNamespace(_skipped=0, accelerator=accelerator)
    step = SimpleNamespace(number=1, rows_without_finite_loss=list)
    metrics = SimpleNamespace(loss=0.7, grad_norm=math.inf, learning_rate=1e-3)
    check = partial(Steps._refuse_non_finite, steps, step, metrics)
    for _ in range(most):
        check()
    refusal(check, match="step 1: the gradient is not finite.*mixed_precision")


def state_of(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    inner = optimizer.optimizer
    scale = accelerator.scaler.get_scale() if accelerator.scaler else inner.loss_scaler.cur_scale
    states = (inner if accelerator.scaler else inner.optimizer).state.values()
    updates = sorted({int(state["step"]) for state in states if "step" in state})
    return {"scale": float(scale), "updates": updates}


def main() -> None:
    grows = sys.argv.pop(1) == "grows"
    state: dict[str, Any] = {}
    step_mean, clip, begin, number = Step.mean, Accelerator.clip_grad_norm_, Run._begin, 0

    def overflowing_mean(step: Step, losses: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number, accelerator = step.number, step.loop.accelerator
        steps = (IN_THE_LOSS,) if accelerator.scaler else (IN_THE_LOSS, IN_A_SHARD)
        overflows = number in steps and accelerator.process_index == accelerator.num_processes - 1
        return step_mean(step, losses) * (math.inf if overflows else 1)

    def overflowing_clip(accelerator: Accelerator, parameters: Any, *more: Any) -> Any:
        parameters = list(parameters)
        if number == IN_A_SHARD and accelerator.scaler:
            for grad in (parameter.grad for parameter in parameters):
                if not isinstance(grad, DTensor):
                    grad.fill_(math.inf)
                elif accelerator.process_index == accelerator.num_processes - 1:
                    grad.to_local().fill_(math.inf)
        return clip(accelerator, parameters, *more)

    def begin_scaled(run: Run, evaluate: Any) -> None:
        begin(run, evaluate)
        accelerator, optimizer = run.accelerator, run._steps.optimizer
        state.update(accelerator=accelerator, optimizer=optimizer)
        if not run._steps.done:
            set_scaler(accelerator, optimizer, {"cur_scale": SCALE / 4 if grows else SCALE})
        if grows and accelerator.scaler:
            accelerator.scaler.set_growth_interval(2)
        elif grows:
            optimizer.optimizer.loss_scaler.scale_window = 2

    with contextlib.ExitStack() as patches:
        patch = mock.patch.object
        patches.enter_context(patch(Run, "_begin", begin_scaled))
        if not grows:
            patches.enter_context(patch(Step, "mean", overflowing_mean))
            patches.enter_context(patch(Accelerator, "clip_grad_norm_", overflowing_clip))
        cls.main()
    if os.environ.get("RANK", "0") == "0":
        folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
        (folder / "fp16.json").write_text(json.dumps(state_of(**state)))
