"""recipes/cls.py in fp16, for tests/matrix.py; the first word says with what.

overflows: gradients that overflow in two steps, on one process only. At the end the loss scale and the optimizer's
           updates are written to OUTPUT_DIR/fp16.json.
grows:     a loss scale that grows in every second step.
"""

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from recipes import cls
from toolkit.launch.accelerator import Accelerator
from toolkit.run import Run
from toolkit.training.precision import set_scaler
from toolkit.training.steps import Step

IN_THE_LOSS, IN_A_SHARD = 2, 5
SCALE = 1024.0  # low enough for no other overflow


def state_of(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    inner = optimizer.optimizer
    scale = accelerator.scaler.get_scale() if accelerator.scaler else inner.loss_scaler.cur_scale
    states = (inner if accelerator.scaler else inner.optimizer).state.values()
    updates = sorted({int(state["step"]) for state in states if "step" in state})
    return {"scale": float(scale), "updates": updates}


def main() -> None:
    grows = sys.argv.pop(1) == "grows"
    state: dict[str, Any] = {}
    step_mean, clip, resume, number = Step.mean, Accelerator.clip_grad_norm_, Run._resume, 0

    def overflowing_mean(step: Step, losses: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number, accelerator = step.number, step.steps.accelerator
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

    def resume_scaled(run: Run, evaluate: Any) -> None:
        resume(run, evaluate)
        accelerator, optimizer = run.accelerator, run._steps.optimizer
        state.update(accelerator=accelerator, optimizer=optimizer)
        if not run._steps.done:
            set_scaler(accelerator, optimizer, {"cur_scale": SCALE / 4 if grows else SCALE})
        if grows and accelerator.scaler:
            accelerator.scaler.set_growth_interval(2)
        elif grows:
            optimizer.optimizer.loss_scaler.scale_window = 2

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Run, "_resume", resume_scaled))
        if not grows:
            patches.enter_context(mock.patch.object(Step, "mean", overflowing_mean))
            patches.enter_context(
                mock.patch.object(Accelerator, "clip_grad_norm_", overflowing_clip)
            )
        cls.main()
    if os.environ.get("RANK", "0") == "0":
        folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
        (folder / "fp16.json").write_text(json.dumps(state_of(**state)))
