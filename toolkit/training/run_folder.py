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

from toolkit.checkpoint.folder import newest_first
from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.launch.environment import attempt, launch_request, max_restarts
from toolkit.training.resume import Origin, choose_origin, previous_attempt_in
from toolkit.utils.files import remove_drafts

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
    origin: Origin
    """Where the run starts."""
    lock: FileLock | None = None
    """Held by the main process while this object exists, so that no second run uses the folder."""

    @property
    def model(self) -> Path:
        return self.path / "model"


def open_run_folder(
    accelerator: Accelerator,
    settings: TrainingSettings,
    recipe: str,
    facts: dict[str, Any],
) -> RunFolder:
    """Opens `--output_dir`; all ranks must call it. `facts`: see `Checkpoints`. Raises UserError if
    the folder holds a run that `--resume` excludes, or that cannot be resumed."""
    folder = None
    outcome: Any = None
    if accelerator.is_main_process:
        try:
            folder = create_run_folder(settings, recipe, facts)
            outcome = (folder.path, folder.origin, "")
        except UserError as error:
            outcome = (None, None, str(error))
    path, origin, fault = broadcast_object_list([outcome])[0]
    if fault:
        raise UserError(fault)
    return folder or RunFolder(path, origin)


def create_run_folder(
    settings: TrainingSettings,
    recipe: str,
    facts: dict[str, Any],
) -> RunFolder:
    """Creates and locks the run's folder, on the main process. Raises UserError."""
    _check_restarts(settings)
    stamp = launch_request().get("started") or time.strftime("%Y%m%d-%H%M%S")
    path = _path_for(settings, recipe, stamp)
    if previous_attempt_in(path / "checkpoints"):  # continues it, despite --resume no
        settings = dataclasses.replace(settings, resume="auto", overwrite_output_dir=False)
    lock = _lock(path)
    content = _run_in(path)
    moves_aside = bool(content) and settings.overwrite_output_dir
    remove_drafts(path / "checkpoints")  # of a killed process
    resume = settings.resume
    if settings.overwrite_output_dir and resume == "auto":
        resume = "no"
    # before the old run is moved: --resume may name one of its checkpoints
    origin = choose_origin(resume, path / "checkpoints", facts)
    if content and not moves_aside and not _can_continue(path, settings, origin, facts):
        fault = f"--output_dir {path} already contains a run ({', '.join(content)})"
        reason = f"--resume {settings.resume} continues from none of its checkpoints"
        remedy = "pass another --output_dir, or --overwrite_output_dir to move that run aside"
        raise UserError(f"{fault}, and {reason}: {remedy}")
    try:
        if moves_aside:
            origin = _move_aside(path, stamp, origin)
        path.mkdir(parents=True, exist_ok=True)
        if lock is None or moves_aside:
            lock = _lock(path)
        (path / ".writable").touch()
        (path / ".writable").unlink()
        if content and not moves_aside:
            remove_drafts(path)  # of a killed process
    except OSError as error:
        fault = f"--output_dir {path} cannot be written ({error.strerror})"
        raise UserError(f"{fault}: name another folder") from error
    return RunFolder(path, origin, lock)


def _check_restarts(settings: TrainingSettings) -> None:
    if not max_restarts():
        return
    if not settings.checkpoint_every:
        raise UserError("--max_restarts resumes from checkpoints: pass --checkpoint_every STEPS")
    if not settings.output_dir and not launch_request().get("started"):
        reason = "the next attempt finds its checkpoints there"
        raise UserError(f"torchrun's --max_restarts needs --output_dir: {reason}")


def _path_for(settings: TrainingSettings, recipe: str, stamp: str) -> Path:
    """`--output_dir`; without it a new folder, in which the attempts of one launch continue."""
    path = Path(settings.output_dir or f"runs/{recipe}-{stamp}")
    if not settings.output_dir and not attempt():
        path = _unused_path(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"--output_dir {path} is a file")
    return path


def _run_in(path: Path) -> list[str]:
    """The names of the files of a run in the folder; none if it failed before its first step."""
    content = [name for name in _FILES if (path / name).exists()]
    if content == ["config.json"] and "identity" in _config_of(path):
        return []
    return content


def _move_aside(path: Path, stamp: str, origin: Origin) -> Origin:
    """Renames the folder to `NAME.old-TIME`, and creates it again; of a link, which may lead to
    another disk, the folder behind it. Returns where `origin` is then. Raises OSError."""
    old = path.resolve()
    if Path.cwd().is_relative_to(old):
        fault = f"--overwrite_output_dir would move the current folder, {old}"
        raise UserError(f"{fault}: start in another folder")
    folder = path
    if path.is_symlink():
        folder = old
    aside = _unused_path(folder.with_name(f"{folder.name}.old-{stamp}"))
    folder.rename(aside)
    folder.mkdir()
    if origin.folder is None or old not in origin.folder.parents:
        return origin
    return Origin(aside / origin.folder.relative_to(old), origin.skipped)


def _lock(path: Path) -> FileLock | None:
    """Locks the folder, if it exists. Raises UserError if another process has locked it."""
    if not path.is_dir():
        return None
    lock = FileLock(path / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        remedy = "choose another folder, or stop that run first"
        # without flock (Lustre) filelock writes the process into it, and only on its machine knows
        # whether it has ended
        if (path / ".lock").stat().st_size:
            remedy += f"; if it has ended, remove {path / '.lock'}"
        raise UserError(f"--output_dir {path}: another run is writing to it: {remedy}") from None
    except (OSError, NotImplementedError):
        # a file system without locks; `create_run_folder` reports one that is read-only
        return None
    return lock


def _config_of(path: Path) -> dict[str, Any]:
    """config.json of the folder; empty if it cannot be read."""
    try:
        return dict(json.loads((path / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _can_continue(
    path: Path,
    settings: TrainingSettings,
    origin: Origin,
    facts: dict[str, Any],
) -> bool:
    """Whether this run continues the one in the folder: from its checkpoint, or from step 0 if it
    has none yet."""
    if origin.folder:
        return (path / "checkpoints").resolve() in origin.folder.resolve().parents
    restarts = settings.resume == "auto" and settings.checkpoint_every
    finished = (path / "report.html").exists()
    if not restarts or finished or newest_first(path / "checkpoints"):
        return False
    before = _config_of(path)
    saved_checkpoints = bool(before.get("settings", {}).get("checkpoint_every"))
    return saved_checkpoints and before.get("identity") == facts["identity"]


def _unused_path(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, ..."""
    candidate = path
    for number in itertools.count(2):
        if not candidate.exists():
            break
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
