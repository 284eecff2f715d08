"""recipes/cls.py in fp16 with a loss scale that grows in every second step; for tests/matrix.py."""

from typing import Any
from unittest import mock

from recipes import cls
from toolkit.run import Run
from toolkit.training.precision import set_scaler

INTERVAL = 2


def main() -> None:
    resume = Run._resume

    def resume_growing(run: Run, evaluate: Any) -> None:
        resume(run, evaluate)
        optimizer = run._steps.optimizer
        set_scaler(run.accelerator, optimizer, {"cur_scale": 256.0})
        if run.accelerator.scaler:
            run.accelerator.scaler.set_growth_interval(INTERVAL)
        else:
            optimizer.optimizer.loss_scaler.scale_window = INTERVAL

    with mock.patch.object(Run, "_resume", resume_growing):
        cls.main()
