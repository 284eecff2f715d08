"""Files and folders that appear whole or not at all: written beside, flushed, renamed. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.errors import UserError, first_line

Kinds = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Key -> what its value must fulfil where there is one that is not null, and the words for it."""
_SHARDS = (lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value.values()),
           "a table of names of files")  # fmt: skip
_OF_A_DISK = re.compile(r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream")
_DRAFTS = re.compile(r"\.(?P<name>.+)\.(?P<kind>draft|old)-[0-9a-f]{16}")


def cache_folder() -> Path:
    """$TOOLKIT_CACHE, or ~/.cache/finetune-toolkit."""
    return Path(os.environ.get("TOOLKIT_CACHE") or Path.home() / ".cache" / "finetune-toolkit")


def draft_path(path: Path, kind: str = "draft") -> Path:
    """A hidden name beside `path` that no other process takes, on whatever machine or in whatever container."""
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(8)}")


def create_file(path: Path) -> BinaryIO:
    """A new file, opened for writing. Raises OSError where there is a file or a link, even one that leads nowhere."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def write_new(path: Path, text: str) -> None:
    """A new file of this text: see `create_file`."""
    with create_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replace_file(path: Path, flush: bool = True) -> Iterator[Path]:
    """Gives a name to write a file (or a link) at; it becomes `path`, in one move, when the block has succeeded.

    With `flush` the file and its name are on the disk then. Whatever ends the block early removes the draft and
    leaves `path` as it was. Makes the folder of `path`. Raises OSError.
    """
    draft = draft_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield draft
        if flush:
            flush_path(draft)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    if flush:
        flush_path(path.parent)


@contextlib.contextmanager
def replace_folder(
    path: Path, overwrite: bool = False, flush: bool = True, spare: Callable[[Path], object] = lambda old: None
) -> Iterator[Path]:
    """Gives an empty folder beside `path`, which becomes `path` when the block has succeeded.

    With `flush` everything in it is on the disk before. With `overwrite` it takes the place of what is there, which
    is removed afterwards, unless `spare`, given it when it has been moved aside, raises; without, what was there or
    appeared meanwhile (but an empty folder) is left alone. Whatever ends the block early, Ctrl-C included, removes the
    draft and the parent folders made for it. Raises OSError.
    """
    draft = draft_path(path)
    new_parents: list[Path] = []
    try:
        for parent in reversed(draft.parents):
            if not parent.exists():
                with contextlib.suppress(FileExistsError):  # another process made it first, and has its own use for it
                    parent.mkdir()
                    new_parents.insert(0, parent)
        draft.mkdir()
        yield draft
        if flush:
            flush_tree(draft)
        _move(draft, path, overwrite, spare)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        for parent in new_parents:  # the innermost first, and only when empty
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    if flush:
        flush_path(path.parent)


def _move(draft: Path, path: Path, overwrite: bool, spare: Callable[[Path], object]) -> None:
    if not overwrite or not os.path.lexists(path):
        draft.rename(path)  # OSError where something is there, but for an empty folder
        return
    old = draft_path(path, "old")
    path.rename(old)
    try:
        spare(old)
        draft.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def make_readable(folder: Path) -> None:
    """By the process's umask, as any other file: safetensors creates files that only their owner may read."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o666 & ~mask)


def remove_drafts(folder: Path) -> None:
    """Removes the drafts of writers that were killed, and renames a folder back that was being replaced.

    Only for a folder in which nobody else is writing.
    """
    for path in sorted(folder.glob(".*")):
        match = _DRAFTS.fullmatch(path.name)
        if match is None:
            continue
        target = folder / match["name"]
        if match["kind"] == "old" and not os.path.lexists(target):
            path.rename(target)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def explain_write_errors(path: Path, state: str = "nothing was left behind") -> Iterator[None]:
    """Raises UserError where the disk does not take what the block writes at `path`; `state` is what is there then."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # safetensors, tokenizers and PyTorch's zip writer raise errors of their own
        if not isinstance(error, OSError) and not _OF_A_DISK.search(str(error)):
            raise
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"cannot write {path}: {why}; {state}") from error


def as_json(content: Any) -> Any:
    """Numbers, lists and tables in place of NumPy's and PyTorch's scalars and arrays; anything else as it is."""
    if isinstance(content, Mapping):
        return {as_json(key): as_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [as_json(value) for value in content]
    return content.tolist() if hasattr(content, "tolist") else content


def nan_to_none(content: Any) -> Any:
    """What is written as JSON, which knows no NaN and no infinity: None in their place."""
    if isinstance(content, dict):
        return {key: nan_to_none(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [nan_to_none(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_table(path: Path, kinds: Kinds) -> dict[str, Any]:
    """The table that a JSON file holds. Raises UserError naming the file and the key."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(table, ensure_ascii=False).encode()  # a lone surrogate can be read, and not be written
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(table, dict):
        raise UserError(f"{path} holds a {type(table).__name__} where a table should be")
    check_values(table, kinds, path)
    return table


def check_values(table: Mapping[str, Any], kinds: Kinds, where: object) -> None:
    """Raises UserError naming `where` and the key of a value that is not of its kind."""
    for key, (fits, description) in kinds.items():
        if table.get(key) is not None and not fits(table[key]):
            raise UserError(f"{where}: {key} is {json.dumps(table[key])[:60]} and should be {description}")


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether it is one from `low` to `high`: neither true nor NaN."""
    return type(value) in (int, float) and low <= value <= high


def refuse_link_out(path: Path, folder: Path) -> None:
    """Raises UserError when `path`, named in `folder`, is by its name or by links a file elsewhere, or no file.

    A hub cache's links (snapshots/COMMIT/NAME -> ../../blobs/DIGEST) are what they should be.
    """
    target, home = path.resolve(), folder.resolve()
    if not target.is_relative_to(home) and target.parent != home.parent.parent / "blobs":
        inside = path.is_relative_to(folder) and ".." not in path.parts
        raise UserError(f"{path} is {'a link to ' * inside}{target}, outside {folder}: put the file itself there")
    if target.exists() and not (target.is_file() or target.is_dir()):  # to read a pipe would wait for ever
        raise UserError(f"{path} is neither a file nor a folder: put a copy of the file there")


def refuse_files_outside(folder: Path) -> None:
    """Raises UserError where a file of a model's folder, or one that an index of its weights names, is elsewhere."""
    for path in folder.iterdir():
        if not path.is_dir():
            refuse_link_out(path, folder)
    for index in folder.glob("*.index.json"):
        shards = read_table(index, {"weight_map": _SHARDS}).get("weight_map") or {}
        for name in sorted(set(shards.values())):
            refuse_link_out(folder / name, folder)


def flush_tree(folder: Path) -> None:
    """Everything in the folder, and the names of its files, are on the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            flush_path(path)
    flush_folders(folder)


def flush_folders(folder: Path) -> None:
    """The names of the files in the folder and in those within are on the disk."""
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        flush_path(path)


def flush_path(path: Path) -> None:
    """What was written to the file, or made, renamed or removed in the folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def templates() -> Path:
    """The folder that holds recipes/, accelerate_configs/ and ds_configs/: a wheel carries them inside the package
    (setup.py puts them there), a clone has them at its top."""
    carried = Path(__file__).resolve().parent.parent / "templates"
    return carried if carried.is_dir() else carried.parent.parent
