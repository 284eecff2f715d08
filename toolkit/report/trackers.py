"""TensorBoard, wandb, mlflow, swanlab, trackio: through Accelerate's trackers, chosen by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import filter_trackers

from toolkit.errors import UserError, did_you_mean

# name -> the package that must be there
KNOWN = {name: name for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")}


def tracker_names(report_to: str) -> list[str]:
    """`tensorboard,wandb` -> its names. Raises UserError for an unknown or missing one."""
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    for name in names:
        if name not in KNOWN:
            raise UserError(f"--report_to {name}{did_you_mean(name, KNOWN)}: known are {', '.join(KNOWN)}, none")
        if importlib.util.find_spec(KNOWN[name]) is None:
            raise UserError(f"--report_to {name} needs a package: pip install {KNOWN[name]} (or --report_to none)")
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
