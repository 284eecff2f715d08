"""Trackers (`--report_to`), which accelerate starts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.errors import UserError, did_you_mean
from toolkit.utils.extras import install_command, is_installed

# these are also the names of their packages
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")


def tracker_names(report_to: str) -> list[str]:
    """`tensorboard,wandb` -> its names. Raises UserError for an unknown or missing one."""
    if report_to == "auto":
        return ["tensorboard"] if is_installed("tensorboard") else []
    names = [name.strip() for name in report_to.split(",")]
    names = [name for name in names if name not in ("", "none")]
    for name in names:
        if name not in TRACKERS:
            choices = ", ".join(TRACKERS)
            hint = did_you_mean(name, TRACKERS)
            raise UserError(f"--report_to {name}{hint}: choose {choices} or none")
        if not is_installed(name):
            install = f"pip install {name}"
            if name == "tensorboard":
                install = install_command(name)
            remedy = f"{install}, or pass --report_to none"
            raise UserError(f"--report_to {name} needs a package: {remedy}")
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
    launch.close_on_failure(partial(close_failed, accelerator.trackers))
    accelerator.log_with = [name for name in names if name != "tensorboard"]
    if "tensorboard" in names:  # it has no projects
        path = str(folder / "tensorboard")
        accelerator.log_with.append(TensorBoardTracker("", path, purge_step=step + 1))
    accelerator.init_trackers(settings.project or project, init_kwargs=options)
    for tracker in accelerator.trackers:
        if tracker.name != "tensorboard":  # it would show them as a second, unnamed run
            tracker.store_init_configuration(config)


def close_failed(trackers: Sequence[Any]) -> None:
    """Closes the trackers of a run that failed, so that none loses a step."""
    for tracker in trackers:
        with contextlib.suppress(Exception):  # one that fails must not keep the others open
            if tracker.name == "wandb":
                tracker.run.finish(exit_code=1)
            else:
                tracker.finish()
