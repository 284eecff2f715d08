"""What a run logs while it trains: metrics.jsonl, eval.jsonl, trackers (`--report_to`, which
accelerate starts), lines in the terminal."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from tqdm import tqdm

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.errors import UserError, did_you_mean, first_line
from toolkit.evaluation import Evaluation
from toolkit.report.files import RunFiles
from toolkit.training.metrics import StepMetrics
from toolkit.utils.extras import is_installed
from toolkit.utils.log import log_on_rank_0

_LOG_EVERY_SECONDS = 10.0
# these are also the names of their packages
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")


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
        self._started = time.monotonic()
        self._printed = -math.inf

    def log_step(self, metrics: StepMetrics) -> None:
        """Logs a step. Its line is in metrics.jsonl before a checkpoint of this step is saved: a
        run that resumes from it has the lines of all its steps."""
        numbers = metrics.line()
        self._step = metrics.step
        self.files.append("metrics.jsonl", numbers)
        self._track("train", numbers, metrics.step)
        now = time.monotonic()
        if metrics.step == self.total or now - self._printed > _LOG_EVERY_SECONDS:
            self._printed = now
            log_on_rank_0(self._progress(metrics, now - self._started))

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

    def log_evaluation(self, evaluation: Evaluation, step: int, best: bool = False) -> None:
        """Logs an evaluation of the weights after `step`, and writes its predictions."""
        self.files.append_evaluation(evaluation, step)
        self.files.write_predictions(evaluation)
        # the best model's is of an earlier step, and W&B drops what comes before its last step
        self._track(evaluation.split, evaluation.single_numbers, max(step, self._step))
        line = f"evaluation of {evaluation.split} at step {step}: {evaluation}"
        if best:
            line += "  (best so far)"
        log_on_rank_0(line)

    def close_trackers(self) -> None:
        """Ends the trackers of a run that has ended well, or by a stop signal."""
        launch.exit_state.close = None
        # not accelerator.end_training(), which also destroys the process group: see launch.failure
        self._for_trackers(lambda tracker: tracker.finish())

    def _track(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        values = {
            f"{group}/{name}": value for name, value in numbers.items() if name != "step"
        }
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
                log_on_rank_0(line, logging.WARNING)


# --- starting the trackers


def tracker_names(report_to: str) -> list[str]:
    """`tensorboard,wandb` -> its names. Raises UserError for an unknown or missing one."""
    if report_to == "auto":
        return ["tensorboard"] if is_installed("tensorboard") else []
    names = [name.strip() for name in report_to.split(",")]
    names = [name for name in names if name not in ("", "none")]
    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            raise UserError(
                f"--report_to {name}{hint}: choose {', '.join(TRACKERS)} or none"
            )
        if not is_installed(name):
            raise UserError(
                f"--report_to {name}: pip install {name}, or pass --report_to none"
            )
    return names


def start_trackers(
    accelerator: Accelerator,
    settings: TrainingSettings,
    folder: Path,
    project: str,
    config: dict[str, Any],
    step: int,
) -> None:
    """Starts the trackers of `--report_to` on the main process.

    `project` is the default of `--project`, `config` holds all settings; TensorBoard, whose files
    are in the run folder, drops events after `step`. Raises what a tracker raises that cannot
    start: without a login, or an answer from its server.
    """
    if not accelerator.is_main_process:
        return
    names = tracker_names(settings.report_to)
    run_name = settings.run_name or folder.name
    options = {
        "wandb": {"name": run_name, "dir": str(folder)},
        "mlflow": {"run_name": run_name},
        "swanlab": {"experiment_name": run_name, "logdir": str(folder / "swanlab")},
        "trackio": {"name": run_name},
    }
    launch.exit_state.close = lambda: close_failed(accelerator)
    accelerator.log_with = [name for name in names if name != "tensorboard"]
    if "tensorboard" in names:  # it has no projects
        path = str(folder / "tensorboard")
        accelerator.log_with.append(TensorBoardTracker("", path, purge_step=step + 1))
    accelerator.init_trackers(settings.project or project, init_kwargs=options)
    for tracker in accelerator.trackers:
        if tracker.name != "tensorboard":  # it would show them as a second, unnamed run
            tracker.store_init_configuration(config)


def close_failed(accelerator: Accelerator) -> None:
    """Closes the trackers of a run that failed, so that none loses a step."""
    for tracker in accelerator.trackers:
        with contextlib.suppress(Exception):  # one that fails must not keep the others open
            if tracker.name == "wandb":
                tracker.run.finish(exit_code=1)
            else:
                tracker.finish()
