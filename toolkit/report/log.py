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

    def write_line(self, more: Mapping[str, Any] | None = None) -> None:
        """Appends the step's line to metrics.jsonl; `more` belongs to it, too."""
        if self._line is not None:
            self.files.append_metrics({**self._line, **(more or {})})
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

    def close(self) -> None:
        """Writes what is left, and ends the trackers."""
        self.write_line()
        self.progress.close()
        # not accelerator.end_training(), which also takes the process group down: see launch.failure
        for tracker in self.accelerator.trackers:
            tracker.finish()


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
