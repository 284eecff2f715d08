"""Trackers (`--report_to`): accelerate starts them; a run goes on without one that fails."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.errors import UserError, did_you_mean, first_line
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
    """Starts the trackers of `--report_to` on the main process, with their files in the run folder.

    `project` is the default of `--project`, `config` holds all settings; TensorBoard drops events
    after `step`. Raises UserError if one cannot start: no login, no answer from its server.
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
    accelerator.log_with = [name for name in names if name != "tensorboard"]
    if "tensorboard" in names:  # it has no projects
        path = str(folder / "tensorboard")
        accelerator.log_with.append(TensorBoardTracker("", path, purge_step=step + 1))
    launch.close_on_failure(partial(mark_failed, accelerator.trackers))
    try:
        if "mlflow" in names:
            _set_mlflow_store(folder / "mlflow")
        accelerator.init_trackers(settings.project or project, init_kwargs=options)
        for tracker in accelerator.trackers:
            if tracker.name != "tensorboard":  # it would show them as a second, unnamed run
                tracker.store_init_configuration(config)
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        remedy = "fix that, or pass --report_to none"
        raise UserError(f"--report_to {','.join(names)} cannot start ({why}): {remedy}") from error


def _set_mlflow_store(folder: Path) -> None:
    """The folder, unless MLFLOW_TRACKING_URI is set."""
    if "MLFLOW_TRACKING_URI" not in os.environ:
        folder.mkdir(exist_ok=True)
        mlflow = importlib.import_module("mlflow")
        mlflow.set_tracking_uri(f"sqlite:///{folder.resolve()}/mlflow.db")


def mark_failed(trackers: Sequence[Any]) -> None:
    """Ends the trackers of a run that failed."""
    for tracker in trackers:
        with contextlib.suppress(Exception):  # one that fails must not keep the others open
            if tracker.name == "wandb":
                tracker.run.finish(exit_code=1)
            elif tracker.name == "mlflow":
                importlib.import_module("mlflow").end_run("FAILED")
            elif tracker.name == "swanlab":
                tracker.run.finish("crashed", "the run failed")
            else:
                tracker.finish()
