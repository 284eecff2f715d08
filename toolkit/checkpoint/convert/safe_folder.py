"""An output folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from toolkit.checkpoint.folder import MANIFEST, flush_folder, flush_folders
from toolkit.errors import UserError, listing

_FLUSH_SECONDS = 0.05
# What conversions write: --overwrite removes nothing else.
_OURS = re.compile(
    r"(pytorch_)?model.*\.(safetensors|json)|adapter_(config\.json|model\.safetensors)|(generation_)?config\.json"
    r"|.*token.*\.(json|model)|vocab\.(txt|json)|merges\.txt|.*spiece\.model|sentencepiece.*|chat_template.*"
)


def check_place(out: Path, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Raises UserError when `out` cannot be written, or writing it would destroy something.

    `inputs`: files and folders that are read. None may lie in a folder that is to be replaced.
    """
    if not out.name or out.name == "..":
        raise UserError(f"the output {str(out)!r} is no name of a folder to make: toolkit convert CHECKPOINT OUT")
    _refuse_inside_a_checkpoint(out)
    for path in inputs:
        if path.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out} holds {path}, which is to be read: name another folder for the output")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise UserError(f"{out} is already there: name another folder, or replace it with --overwrite")
    if not out.is_dir() or out.is_symlink():
        raise UserError(f"{out} is not a folder: --overwrite replaces only folders")
    if foreign := sorted(path.name for path in out.iterdir() if not _is_ours(path)):
        raise UserError(
            f"{out} holds {listing(foreign, 3)}, which a conversion does not write and --overwrite would remove: name "
            "another folder, or take that away yourself"
        )


def _is_ours(path: Path) -> bool:
    return bool(_OURS.fullmatch(path.name)) and path.is_file()


def _refuse_inside_a_checkpoint(out: Path) -> None:
    """It would go with the checkpoint when newer ones take its place."""
    inside = next((folder for folder in out.absolute().parents if (folder / MANIFEST).is_file()), None)
    if inside is not None:
        raise UserError(f"{out} lies in the checkpoint {inside}, and would be removed with it: name another folder")


def check_space(out: Path, needed: int) -> None:
    """Raises UserError when the disk of `out` has not `needed` bytes left."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB left and the output needs {needed / 1e9:.2f}: free some space"
        )


@contextlib.contextmanager
def made_beside(out: Path, flushes: bool = True) -> Iterator[Path]:
    """Gives an empty folder beside `out`, and puts it in `out`'s place when the block has succeeded.

    With `flushes` everything is on the disk before that.

    Whatever ends the block early, Ctrl-C included, removes the folder and leaves `out` as it was. Raises
    UserError when the folder cannot be made or put in place.
    """
    draft = out.with_name(f".{out.name}.partial-{os.getpid()}")
    made = [parent for parent in draft.parents if not parent.exists()]
    try:
        try:
            draft.mkdir(parents=True)
            yield draft
            if flushes:
                flush(draft)
            _replace(out, draft, flushes)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}; nothing was left behind") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        for parent in made:  # the innermost first; only those made here, and only when empty
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


@contextlib.contextmanager
def flushing(files: Sequence[int]) -> Iterator[None]:
    """Writes open files back to the disk while the block fills them, so that little is left for its end.

    Raises OSError when the disk refuses what was written.
    """
    done, faults = threading.Event(), []

    def flush() -> None:
        while not done.wait(_FLUSH_SECONDS):
            for file in files:
                try:
                    os.fdatasync(file)
                except OSError as error:  # it is reported once: a later fsync would succeed
                    faults.append(error)
                    return

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if faults:
        raise faults[0]


def _replace(out: Path, draft: Path, flushes: bool) -> None:
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    there = os.path.lexists(out)
    if there:
        out.rename(old)
    try:
        draft.rename(out)
    except BaseException:
        if there:
            old.rename(out)
        raise
    if flushes:
        flush_folder(out.parent)
    if there:
        shutil.rmtree(old, ignore_errors=True)


def flush(folder: Path) -> None:
    """Everything in the folder, and the names of its files, are on the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    flush_folders(folder)
