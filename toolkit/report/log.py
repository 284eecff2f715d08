"""What a run logs while it trains: metrics.jsonl and eval.jsonl, trackers, and the screen."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from accelerate import Accelerator

from toolkit.evaluation import Evaluation
from toolkit.report.files import RunFiles
from toolkit.report.progress import Progress
from toolkit.training.checkpoints import Saved
from toolkit.training.steps import StepMetrics


class RunLog:
    """Logs steps and evaluations; every process calls every method."""

    def __init__(self, accelerator: Accelerator, files: RunFiles, total_steps: int, done: int) -> None:
        self.accelerator, self.files = accelerator, files
        self.progress = Progress(accelerator, total_steps, done)
        self._line: dict[str, Any] | None = None

    def log_step(self, metrics: StepMetrics) -> None:
        """Shows a finished step; its line of metrics.jsonl waits for what a checkpoint after it costs."""
        self.write_line()
        self._line = asdict(metrics)
        numbers = {f"train/{name}": value for name, value in self._line.items() if name != "step"}
        self.accelerator.log(numbers, step=metrics.step)
        self.progress.step(metrics)

    def write_line(self, saved: Saved | None = None) -> None:
        """Appends the step's line to metrics.jsonl."""
        if self._line is not None:
            cost = {"checkpoint_seconds": round(saved.seconds, 3), "checkpoint_bytes": saved.size} if saved else {}
            self.files.append_metrics({**self._line, **cost})
        self._line = None

    def log_evaluation(self, evaluation: Evaluation, step: int, best: bool = False) -> None:
        """Records an evaluation of the weights of `step`, and writes its predictions."""
        self.files.append_evaluation(evaluation, step)
        self.files.write_predictions(evaluation)
        numbers = {name: value for name, value in evaluation.numbers.items() if isinstance(value, float)}
        self.accelerator.log({f"{evaluation.split}/{name}": value for name, value in numbers.items()}, step=step)
        self.progress.evaluation(evaluation, step, best)

    def log_comparison(self, evaluation: Evaluation, step: int, max_length: int) -> None:
        """Records what the saved model makes of the same samples, cut at `max_length` tokens."""
        self.files.append_evaluation(evaluation, step, max_length=max_length)

    def say(self, line: str) -> None:
        """Prints a line, on one process."""
        self.progress.say(line)

    def close(self) -> None:
        """Writes what is left, and ends the trackers."""
        self.write_line()
        self.progress.close()
        # not accelerator.end_training(), which also takes the process group down: see launch.failure
        for tracker in self.accelerator.trackers:
            tracker.finish()
