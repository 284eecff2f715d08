"""Progress on one process: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time

from accelerate import Accelerator
from tqdm import tqdm

from toolkit.evaluation import Evaluation
from toolkit.training.steps import StepMetrics

_LOG_EVERY_SECONDS = 10.0


class Progress:
    """Loss, speed and time left."""

    def __init__(self, accelerator: Accelerator, total_steps: int, done: int = 0) -> None:
        self.on = accelerator.is_main_process
        self.total, self.before = total_steps, done
        self.started = self.said = time.monotonic()
        self.bar = tqdm(
            total=total_steps, initial=done, unit="step", dynamic_ncols=True, disable=None if self.on else True
        )

    def step(self, metrics: StepMetrics) -> None:
        if not self.on:
            return
        self.bar.update(1)
        self.bar.set_postfix_str(f"loss {metrics.loss:.4f}, {metrics.samples_per_second:.0f} samples/s", refresh=False)
        now = time.monotonic()
        first_or_last = metrics.step in (self.before + 1, self.total)
        if self.bar.disable and (now - self.said > _LOG_EVERY_SECONDS or first_or_last):
            self.said = now
            left = (now - self.started) / (metrics.step - self.before) * (self.total - metrics.step)
            self.say(
                f"step {metrics.step}/{self.total}  epoch {metrics.epoch:.2f}  loss {metrics.loss:.4f}  "
                f"{metrics.samples_per_second:.0f} samples/s  {tqdm.format_interval(left)} left"
            )

    def evaluation(self, evaluation: Evaluation, step: int, best: bool) -> None:
        shown = {name: value for name, value in evaluation.numbers.items() if isinstance(value, float)}
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        mark = "  (best so far)" if best else ""
        self.say(f"evaluation of {evaluation.split} at step {step}: {numbers}{mark}")

    def say(self, line: str) -> None:
        if self.on:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        self.bar.close()
