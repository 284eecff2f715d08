"""Atomic writes of files and folders (draft, flush, rename), strict reading of YAML and JSON,
checks of a model's folder. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import UserError, first_line

_DISK_ERROR = re.compile(r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream")
_DRAFTS = re.compile(r"\.(?P<name>.+)\.(?P<kind>draft|old)-[0-9a-f]{16}")


def cache_folder() -> Path:
    """$TOOLKIT_CACHE, or ~/.cache/finetune-toolkit."""
    return Path(os.environ.get("TOOLKIT_CACHE") or "~/.cache/finetune-toolkit").expanduser()


def draft_path(path: Path, kind: str = "draft") -> Path:
    """A hidden, random name next to `path`: unique across machines and containers, which may share
    process ids."""
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(8)}")


def write_new(path: Path, text: str) -> None:
    """Raises FileExistsError if there is a file or a link, even a dangling one."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def replace_file(path: Path, flush: bool = True) -> Iterator[Path]:
    """Yields a draft path for a file (or a link), and renames it to `path` when the block succeeds.

    With `flush` the file and its name are then on the disk. If the block fails, the draft is
    removed and `path` is not changed. Creates the parent folders. Raises OSError."""
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
def replace_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty draft folder, and renames it to `path` when the block succeeds.

    Its content is on the disk before. Without `overwrite` it raises OSError if there is anything
    but an empty folder at `path`. If the block fails (Ctrl-C included), the draft is removed."""
    draft = draft_path(path)
    try:
        draft.mkdir(parents=True)
        yield draft
        for written in [*draft.rglob("*"), draft]:
            flush_path(written)
        _move(draft, path, overwrite)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    flush_path(path.parent)


def _move(draft: Path, path: Path, overwrite: bool) -> None:
    if not overwrite or not os.path.lexists(path):
        draft.rename(path)  # OSError if anything but an empty folder is there
        return
    old = draft_path(path, "old")
    path.rename(old)
    try:
        draft.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def flush_path(path: Path) -> None:
    """Flushes a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise  # by these two a disk says that it cannot flush a folder (SMB, vboxsf)
    finally:
        os.close(descriptor)


def make_readable(folder: Path) -> None:
    """Gives .safetensors files the permissions of the umask: safetensors lets only their owner read
    them."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o666 & ~mask)


def remove_drafts(folder: Path) -> None:
    """Removes the drafts of killed writers, and restores a folder that was being replaced. No other
    process may be writing in `folder`."""
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
def explain_write_errors(
    path: Path, state: str = "nothing was left behind"
) -> Iterator[None]:
    """Turns a disk error of the block, which writes `path`, into a UserError; `state` says what is
    at `path` then."""
    try:
        yield
    except Exception as error:
        # safetensors, tokenizers and PyTorch's zip writer raise other errors than OSError
        if not isinstance(error, OSError) and not _DISK_ERROR.search(str(error)):
            raise
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"cannot write {path}: {why}; {state}") from error


def as_json(content: Any) -> Any:
    """Converts NumPy's and PyTorch's scalars and arrays in `content` to Python numbers and lists;
    keys become strings."""
    return json.loads(json.dumps(content, default=lambda value: value.tolist()))


def nan_to_none(content: Any) -> Any:
    """Replaces NaN and infinities by None: JSON has neither. What else it lacks becomes text."""
    return json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises UserError naming the file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(table, dict):
        raise UserError(f"{path} is not a JSON object of names and values")
    return table


def refuse_lfs_pointer(path: Path) -> None:
    """Raises UserError for what `git clone` leaves in the place of a large file if Git LFS is not
    installed."""
    with path.open("rb") as file:
        if file.read(20) == b"version https://git-":
            fix = f"run `git lfs install && git lfs pull` in {path.parent}, or download it"
            raise UserError(f"{path} is a Git LFS pointer, not the file itself: {fix}")


def templates() -> Path:
    """The folder with recipes/, accelerate_configs/ and ds_configs/: toolkit/templates in a wheel
    (see setup.py), the repository in a clone."""
    in_wheel = Path(__file__).resolve().parent.parent / "templates"
    return in_wheel if in_wheel.is_dir() else in_wheel.parent.parent


class _PlainLoader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML silently drops the first."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Raises UserError for a file that cannot be read or is not valid."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _PlainLoader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"{path} is not valid YAML: {' '.join(str(error).split())}"
        ) from error
