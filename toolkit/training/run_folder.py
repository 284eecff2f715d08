"""The folder of a run: created, locked, resumed in, or moved aside."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from toolkit.checkpoint import folder as folders
from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.launch.environment import attempt, launch_request, launcher_start
from toolkit.training.resume import choose_origin
from toolkit.utils.files import remove_drafts
from toolkit.utils.log import logger

_FILES = (
    "config.json",
    "metrics.jsonl",
    "eval.jsonl",
    "predictions.jsonl",
    "model",
    "checkpoints",
    "report.html",
)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, opened."""

    path: Path
    origin: Path | None
    """The checkpoint, read and whole, from which the run starts; None: at step 0."""
    lock: FileLock | None = None
    """Held by the main process while this object exists, so that no second run uses the folder."""

    @property
    def model(self) -> Path:
        return self.path / "model"


def open_run_folder(
    accelerator: Accelerator,
    settings: TrainingSettings,
    recipe: str,
    provenance: dict[str, Any],
) -> RunFolder:
    """Opens `--output_dir`; all ranks must call it. `provenance`: see `Checkpoints`. Raises
    UserError, on the main process, if the folder holds a run that `--resume` excludes, or that
    cannot be resumed."""
    folder = None
    if accelerator.is_main_process:
        folder = create_run_folder(settings, recipe, provenance)
    paths = (folder.path, folder.origin) if folder else None
    path, origin = broadcast_object_list([paths])[0]
    return folder or RunFolder(path, origin)


def create_run_folder(
    settings: TrainingSettings,
    recipe: str,
    provenance: dict[str, Any],
) -> RunFolder:
    """Creates and locks the run's folder, on the main process. A run in it is continued from a
    checkpoint; it is moved aside if it ended before its first one, or with
    `--overwrite_output_dir`. Raises UserError, and OSError if the folder cannot be written."""
    stamp = launch_request().get("started") or time.strftime("%Y%m%d-%H%M%S")
    path = _path_for(settings, recipe, stamp)
    checkpoints = path / "checkpoints"
    if attempt() and folders.newest_save_time(checkpoints) > launcher_start():
        # a restart continues from what its job has saved, despite --resume no
        settings = dataclasses.replace(settings, resume="auto", overwrite_output_dir=False)
    lock = _create(path)
    remove_drafts(checkpoints)  # of a killed process
    resume = settings.resume
    if settings.overwrite_output_dir and resume == "auto":
        resume = "no"
    # before the old run is moved: --resume may name one of its checkpoints
    origin = choose_origin(resume, checkpoints, provenance)
    content = [name for name in _FILES if (path / name).exists()]
    if content and (settings.overwrite_output_dir or _ended_early(path)):
        origin = _move_aside(path, stamp, origin)
        lock = _create(path)
    elif content and (origin is None or origin.parent.resolve() != checkpoints.resolve()):
        fault = f"--output_dir {path} already contains a run ({', '.join(content)})"
        reason = f"--resume {settings.resume} continues from none of its checkpoints"
        remedy = (
            "pass another --output_dir, or --overwrite_output_dir to move that run aside"
        )
        raise UserError(f"{fault}, and {reason}: {remedy}")
    elif content:
        remove_drafts(path)  # of a killed process
    return RunFolder(path, origin, lock)


def _path_for(settings: TrainingSettings, recipe: str, stamp: str) -> Path:
    """`--output_dir`; without it a new folder, in which the attempts of one launch continue."""
    if settings.output_dir:
        return Path(settings.output_dir)
    path = Path(f"runs/{recipe}-{stamp}")
    return path if attempt() else _unused_path(path)


def _create(path: Path) -> FileLock | None:
    """Creates the folder, and locks it. Raises UserError if another process has locked it, and
    OSError if it cannot be created."""
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        remedy = f"choose another folder, or stop that run (if it has ended, remove {path}/.lock)"
        raise UserError(
            f"--output_dir {path}: another run is writing to it: {remedy}"
        ) from None
    except (OSError, NotImplementedError):
        return None  # a file system without locks, or a folder that cannot be written
    return lock


def _ended_early(path: Path) -> bool:
    """Whether a run has ended in this folder before its first checkpoint, and before its end."""
    config = path / "config.json"
    try:
        is_run = "identity" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
    has_ended = (path / "report.html").exists() or folders.newest_first(
        path / "checkpoints"
    )
    return is_run and not has_ended


def _move_aside(path: Path, stamp: str, origin: Path | None) -> Path | None:
    """Renames the folder to `NAME.old-TIME`; of a link, which may lead to another disk, the folder
    behind it. Returns where `origin` is then. Raises OSError."""
    folder = path.resolve()
    if Path.cwd().is_relative_to(folder):
        fault = f"the run in {folder} would be moved aside, and it is the current folder"
        raise UserError(f"{fault}: start in another folder")
    aside = _unused_path(folder.with_name(f"{folder.name}.old-{stamp}"))
    folder.rename(aside)
    folder.mkdir()
    logger.info(f"moved the run in {path} to {aside}")
    if origin is None or folder not in origin.parents:
        return origin
    return aside / origin.relative_to(folder)


def _unused_path(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, ..."""
    candidate = path
    for number in itertools.count(2):
        if not candidate.exists():
            break
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
