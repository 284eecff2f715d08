"""The cache in `cache_folder()`: folders built once per machine (tokens, converted models), checksums, prune."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from toolkit import launch
from toolkit.errors import UserError
from toolkit.utils.files import cache_folder, replace_file, replace_folder
from toolkit.utils.log import logger

if TYPE_CHECKING:
    from accelerate import Accelerator

FILES = "files.json"
"""Written last into each cached folder: its source, and the size and checksum of every file."""
_LOG_SECONDS = 300.0
_LARGE_BYTES, _SETTLED_SECONDS, _DIGEST_LETTERS = 32 << 20, 2.0, 32


@contextlib.contextmanager
def cached_folder(
    kind: str, digest: str, accelerator: Accelerator | None, source: str = ""
) -> Iterator[tuple[Path, Path | None]]:
    """Yields (the cache folder `kind`/`digest`, a draft to fill, or None if the folder is complete). The draft becomes
    the folder when the block ends. One process per machine fills it. `toolkit cache` prints `source`.

    Other processes wait for a file lock, not in a collective, which could time out. Raises UserError if the folder
    cannot be written, or if the digests of the ranks differ.
    """
    folder = cache_folder() / kind / digest
    try:
        if find_damage(folder) is None:
            yield folder, None
        else:
            with _locked_draft(folder, source) as draft:
                yield folder, draft
    except OSError as error:
        raise UserError(
            f"cannot write {folder} [{error.strerror or error}]: set TOOLKIT_CACHE to another folder (export "
            "TOOLKIT_CACHE=$(mktemp -d), say), or free space if the disk is full; nothing was left behind"
        ) from error
    with contextlib.suppress(OSError):  # read-only for this user
        os.utime(verified_marker(folder))
    if accelerator is not None:
        launch.wait_for_all(f"the {kind} {digest}")
        launch.require_equal(accelerator, f"the {kind}", {"source": digest})


@contextlib.contextmanager
def _locked_draft(folder: Path, source: str) -> Iterator[Path | None]:
    """Yields None if another process has filled the folder while this one waited for the lock."""
    from filelock import FileLock, Timeout  # 3 MB that `toolkit convert` does not need

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        acquired = lock.acquire(timeout=_LOG_SECONDS)
    except Timeout:  # on a disk without flock that of a process killed on another machine stays
        logger.warning(f"waiting for the process that builds {folder}; if there is none, remove {lock.lock_file}")
        acquired = lock.acquire()
    with acquired:
        damage = find_damage(folder)
        if damage is None:
            yield None
            return
        if damage:
            logger.warning(f"{folder} is damaged ({damage}): rebuilding it")
        _remove_drafts(folder)
        with replace_folder(folder, overwrite=True) as draft:
            yield draft
            files = {name: [path.stat().st_size, digest_of_file(path)] for name, path in files_of(draft).items()}
            (draft / FILES).write_text(json.dumps({"source": source, "checksums": files}), encoding="utf-8")
        find_damage(folder)


def find_damage(folder: Path) -> str | None:
    """The first file of a cached folder that has changed since it was written; None if none has; "" without a folder.

    Sizes are compared every time, checksums (1 s per GB) only when inode, mtime or ctime of a file have changed.
    """
    if not folder.exists():
        return ""
    checked = verified_marker(folder)
    try:
        listed = json.loads((folder / FILES).read_bytes())["checksums"]
        stats = {name: (folder / name).stat() for name in listed}
        changed = next((name for name, stat in stats.items() if stat.st_size != listed[name][0]), None)
        state = json.dumps({name: [stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()})
        if changed or (checked.is_file() and checked.read_text() == state):
            return changed
        changed = next((name for name in stats if digest_of_file(folder / name) != listed[name][1]), None)
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return FILES
    if changed is None:
        with contextlib.suppress(OSError):
            checked.write_text(state)
    return changed


def verified_marker(folder: Path) -> Path:
    """The file next to a cached folder with the stat values for which the checksums matched. Its mtime is the folder's
    last use."""
    return folder.with_name(f".{folder.name}.checked")


def files_of(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _remove_drafts(folder: Path) -> None:
    """Removes what killed builds left. The caller holds the folder's lock."""
    for dead in folder.parent.glob(f".{folder.name}.*-*"):
        shutil.rmtree(dead, ignore_errors=True)


def digest_of_file(path: Path) -> str:
    """XXH3-128 of the file's bytes, as hex."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def cached_digest(path: Path) -> str:
    """`digest_of_file`; for a large file it is cached until inode, size, mtime or ctime change."""
    stat = path.stat()
    state = f"{path.absolute()} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    record = cache_folder() / "digests" / digest_of_text(state)
    # two writes within a tick of the file system's clock leave the same times
    if stat.st_size < _LARGE_BYTES or time.time() - stat.st_ctime < _SETTLED_SECONDS:
        return digest_of_file(path)
    with contextlib.suppress(OSError):
        if len(digest := record.read_text()) == _DIGEST_LETTERS:  # it is not flushed: a power cut may have truncated it
            return digest
    digest = digest_of_file(path)
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(record, flush=False) as draft:
            draft.write_text(digest)
    return digest


def digest_of_text(text: str) -> str:
    """24 hex digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def digest_of_files(folder: Path, files: Iterable[Path]) -> str:
    """A digest of the names (relative to `folder`) and contents of files, without hidden ones."""
    names = {path.relative_to(folder): path for path in files if path.is_file()}
    visible = sorted(name for name in names if not any(part.startswith(".") for part in name.parts))
    lines = "\n".join(f"{name.as_posix()} {digest_of_file(names[name])}" for name in visible)
    return xxhash.xxh3_128(lines.encode()).hexdigest()


def remove(folder: Path) -> bool:
    """Removes a cached folder; returns False if it is being built."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(f"{folder}.lock", timeout=0):
            shutil.rmtree(folder)
            verified_marker(folder).unlink(missing_ok=True)
            _remove_drafts(folder)
    except Timeout:
        return False
    except FileNotFoundError:  # another machine, which shares this cache, has removed it
        pass
    except OSError as error:
        raise UserError(f"cannot remove {folder}: {error.strerror}") from error
    return True
