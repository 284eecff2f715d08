"""What a run logs while it trains: metrics.jsonl and eval.jsonl, trackers (chosen by name), and the screen."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import filter_trackers
from tqdm import tqdm

from toolkit.errors import UserError, did_you_mean
from toolkit.evaluation import Evaluation
from toolkit.report.files import RunFiles
from toolkit.training.steps import StepMetrics

TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
"""Each is the name of its package, too."""
_LOG_EVERY_SECONDS = 10.0
_MOST_CLASSES = 20


class RunLog:
    """Logs steps and evaluations: loss, speed and time left on the screen, all of it in files and trackers.

    Every process calls every method.
    """

    def __init__(self, accelerator: Accelerator, files: RunFiles, total_steps: int, done: int) -> None:
        self.accelerator, self.files = accelerator, files
        self.total, self.before = total_steps, done
        self.started = self.said = time.monotonic()
        self._bar = tqdm(
            total=total_steps, initial=done, unit="step", dynamic_ncols=True, disable=None if files.writes else True
        )
        self._line: dict[str, Any] | None = None

    def say(self, line: str) -> None:
        """Prints a line, on one process."""
        if self.files.writes:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()

    def log_step(self, metrics: StepMetrics) -> None:
        """Shows a finished step; its line of metrics.jsonl waits for what a checkpoint after it costs."""
        self.write_line()
        self._line = {name: value for name, value in asdict(metrics).items() if value is not None}
        numbers = {f"train/{name}": value for name, value in self._line.items() if name != "step"}
        self.accelerator.log(numbers, step=metrics.step)
        shown = f"loss {metrics.loss:.4f}, {metrics.samples_per_second:.0f} samples/s"
        self._bar.update(1)
        self._bar.set_postfix_str(shown, refresh=False)
        now = time.monotonic()
        first_or_last = metrics.step in (self.before + 1, self.total)
        if self._bar.disable and (now - self.said > _LOG_EVERY_SECONDS or first_or_last):
            self.said = now
            left = (now - self.started) / (metrics.step - self.before) * (self.total - metrics.step)
            self.say(
                f"step {metrics.step}/{self.total}  epoch {metrics.epoch:.2f}  loss {metrics.loss:.4f}  "
                f"{metrics.samples_per_second:.0f} samples/s  {tqdm.format_interval(left)} left"
            )

    def write_line(self, more: Mapping[str, Any] | None = None) -> None:
        """Appends the step's line to metrics.jsonl; `more` belongs to it, too."""
        if self._line is not None:
            self.files.append_metrics({**self._line, **(more or {})})
        self._line = None

    def log_evaluation(self, evaluation: Evaluation, step: int, best: bool = False) -> None:
        """Logs an evaluation of the weights of `step`, and writes its predictions."""
        self.files.append_evaluation(evaluation, step)
        self.files.write_predictions(evaluation)
        numbers = evaluation.single_numbers
        self.accelerator.log({f"{evaluation.split}/{name}": value for name, value in numbers.items()}, step=step)
        mark = "  (best so far)" if best else ""
        self.say(f"evaluation of {evaluation.split} at step {step}: {evaluation}{mark}")

    def close(self) -> None:
        """Writes what is left, and ends the trackers."""
        self.write_line()
        self._bar.close()
        # not accelerator.end_training(), which also takes the process group down: see launch.failure
        for tracker in self.accelerator.trackers:
            tracker.finish()


def class_lines(evaluation: Evaluation) -> list[str]:
    """F1 of each class, the lowest first where there are many."""
    classes = evaluation.numbers.get("per_class", {})
    names = list(classes)
    if len(names) > _MOST_CLASSES:
        names = sorted(names, key=lambda name: classes[name]["f1"])[:_MOST_CLASSES]
    lines = [f"  F1 {classes[name]['f1']:.4f}  {name} ({classes[name]['support']} samples)" for name in names]
    return [*lines, f"  and {len(classes) - len(names)} classes with more"] if len(names) < len(classes) else lines


def tracker_names(report_to: str) -> list[str]:
    """`tensorboard,wandb` -> its names. Raises UserError for an unknown or missing one."""
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--report_to {name}{did_you_mean(name, TRACKERS)}: known are {', '.join(TRACKERS)}, none")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--report_to {name} needs a package: pip install {name} (or --report_to none)")
    return names


def start_trackers(
    accelerator: Accelerator, names: list[str], project: str, folder: Path, settings: dict[str, Any], step: int = 0
) -> None:
    """Opens the trackers; TensorBoard writes to `folder`/`project`, and hides what lies after `step`."""
    accelerator.log_with = filter_trackers(names, folder)
    accelerator.project_configuration.logging_dir = str(folder)
    shown = {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in settings.items()
    }
    # TensorBoard would put the settings into a second, nameless run; config.json holds them
    accelerator.init_trackers(project, config=None if names == ["tensorboard"] else shown,
                              init_kwargs={"tensorboard": {"purge_step": step + 1}} if step else {})  # fmt: skip
