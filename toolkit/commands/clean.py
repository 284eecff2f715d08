"""`toolkit clean`: removes the checkpoints of finished runs. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.checkpoint.folder import complete, list_newest_first, read_manifest, remove
from toolkit.errors import UserError, listing, size_text
from toolkit.utils.features import Command
from toolkit.utils.files import read_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")


def run(options: argparse.Namespace) -> None:
    for path in options.runs:
        print(clean(path))


def clean(path: Path) -> str:
    """Returns a line with the bytes freed. Raises UserError if the run is not finished."""
    if not (path / "config.json").is_file():
        raise UserError(f"{path} {'is not a run: it has no config.json' if path.is_dir() else 'does not exist'}")
    config = read_table(path / "config.json", {})
    with _locked(path):
        if why := _unfinished(path, config):
            raise UserError(f"{path} {why}: the same command resumes it from its checkpoints")
        checkpoints = path / "checkpoints"
        folders = list_newest_first(checkpoints)
        stored = [folder for folder in folders if not folder.is_symlink()]  # of a link only the link is removed
        size = sum(file.stat().st_size for folder in stored for file in folder.rglob("*") if file.is_file())
        try:
            for folder in folders:
                remove(folder)
            for name in ("best", "last"):
                remove(checkpoints / name)
        except OSError as error:
            raise UserError(f"cannot remove {error.filename}: {error.strerror}") from error
        if remaining := [folder.name for folder in folders if folder.exists()]:
            raise UserError(f"cannot remove {listing(remaining)} of {checkpoints}")
        with contextlib.suppress(OSError):  # other files are in it, or it does not exist
            checkpoints.rmdir()
    names = listing(folder.name for folder in folders) or "there were no checkpoints"
    return f"{path}: freed {size_text(size)} ({names})"


def _unfinished(path: Path, config: dict[str, Any]) -> str:
    """Why a run is not finished; empty if it is."""
    report = path / "report.html"
    if "stopped" in config:
        return "was stopped"
    # a run writes its config when it starts or resumes, and its report at the end
    if not report.is_file() or report.stat().st_mtime < (path / "config.json").stat().st_mtime:
        return "is not finished"
    settings, total = config.get("settings") or {}, (config.get("data") or {}).get("total_steps")
    try:
        step = json.loads((path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"]
    except (OSError, ValueError, LookupError, TypeError):
        return "has no readable metrics.jsonl with the steps it has taken"
    patience = settings.get("early_stopping_patience")
    # `toolkit report` writes the report of an unfinished run, too
    waited = [read_manifest(folder)["best"]["waited"] for folder in complete(path / "checkpoints")[:1]]
    stopped_early = patience and all(count >= patience for count in waited)
    return "" if step == total or stopped_early else f"has taken {step} of {total} steps"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Takes the lock that a run holds on its folder."""
    from filelock import FileLock, Timeout

    lock = FileLock(path / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{path}: a run is writing to it: stop that run first") from None
    except (OSError, NotImplementedError):
        pass  # a file system without locks
    try:
        yield
    finally:
        lock.release()


COMMAND = Command(
    "clean", "remove the checkpoints of finished runs", run, add_arguments,
    description="Removes the checkpoints of finished runs and nothing else: model/, metrics, predictions and the "
    "report stay. Without its checkpoints a run cannot be resumed.",
)  # fmt: skip
