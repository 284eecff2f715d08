"""What a run logs while it trains: metrics.jsonl, eval.jsonl, trackers, lines in the terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from toolkit import launch
from toolkit.errors import first_line
from toolkit.evaluation import Evaluation
from toolkit.report.files import RunFiles
from toolkit.training.metrics import StepMetrics

_LOG_EVERY_SECONDS = 10.0


class RunLog:
    """Logs steps and evaluations to files, trackers and the terminal. All ranks call every
    method."""

    def __init__(
        self, accelerator: Accelerator, files: RunFiles, total_steps: int, done: int
    ) -> None:
        """`done`: the step that the run resumes from."""
        self.accelerator = accelerator
        self.files = files
        self.total = total_steps
        self.done = done
        self._step = done
        self._line: dict[str, Any] = {}
        self._started = time.monotonic()
        self._printed = self._started

    def log_step(self, metrics: StepMetrics) -> None:
        """Logs a step; `write_line` writes it to metrics.jsonl, with the cost of a checkpoint after
        it."""
        self.write_line()
        self._step = metrics.step
        self._line = metrics.line()
        self._track("train", self._line, metrics.step)
        now = time.monotonic()
        first_or_last = metrics.step in (self.done + 1, self.total)
        if first_or_last or now - self._printed > _LOG_EVERY_SECONDS:
            self._printed = now
            launch.log_on_main(self.accelerator, self._progress(metrics, now - self._started))

    def _progress(self, metrics: StepMetrics, seconds: float) -> str:
        seconds_left = seconds / (metrics.step - self.done) * (self.total - metrics.step)
        parts = [
            f"step {metrics.step}/{self.total}",
            f"epoch {metrics.epoch:.2f}",
            f"loss {metrics.loss:.4f}",
            f"{metrics.samples_per_second:.0f} samples/s",
            f"{tqdm.format_interval(seconds_left)} left",
        ]
        return "  ".join(parts)

    def write_line(self, extra: Mapping[str, Any] | None = None) -> None:
        """Appends the last logged step, and `extra`, to metrics.jsonl, if that is not yet done."""
        if self._line:
            self.files.append("metrics.jsonl", {**self._line, **(extra or {})})
        self._line = {}

    def log_evaluation(self, evaluation: Evaluation, step: int, best: bool = False) -> None:
        """Logs an evaluation of the weights after `step`, and writes its predictions."""
        self.files.append_evaluation(evaluation, step)
        self.files.write_predictions(evaluation)
        # the best model's is of an earlier step, and W&B drops what comes before its last step
        self._track(evaluation.split, evaluation.single_numbers, max(step, self._step))
        line = f"evaluation of {evaluation.split} at step {step}: {evaluation}"
        if best:
            line += "  (best so far)"
        launch.log_on_main(self.accelerator, line)

    def close(self) -> None:
        """Writes the last line and closes the trackers."""
        self.write_line()
        launch.close_on_failure(None)
        # not accelerator.end_training(), which also destroys the process group: see launch.failure
        self._for_trackers(lambda tracker: tracker.finish())

    def _track(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        values = {f"{group}/{name}": value for name, value in numbers.items() if name != "step"}
        self._for_trackers(lambda tracker: tracker.log(values, step=step))

    def _for_trackers(self, call: Callable[[Any], object]) -> None:
        """Calls a function for each tracker. The run continues without one that fails, as when its
        server is gone."""
        for tracker in list(self.accelerator.trackers):
            try:
                call(tracker)
            except Exception as error:
                self.accelerator.trackers.remove(tracker)
                why = f"{type(error).__name__}: {first_line(error)}"
                line = f"--report_to {tracker.name} failed ({why}): continuing without it"
                launch.log_on_main(self.accelerator, line, logging.WARNING)
