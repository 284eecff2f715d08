"""The cache in `cache_folder()`: folders built once per machine (tokens, converted models).

A folder is filled as a draft, under a lock, flushed and renamed: if it exists, it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from toolkit import launch
from toolkit.errors import UserError
from toolkit.utils.files import cache_folder, replace_folder

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextlib.contextmanager
def cached_folder(
    kind: str, digest: str, accelerator: Accelerator | None, source: str = ""
) -> Iterator[tuple[Path, Path | None]]:
    """Yields (the cache folder `kind`/`digest`, a draft to fill, or None if the folder exists).

    The draft becomes the folder when the block ends. One process per machine fills it; the others
    wait for a file lock, not in a collective, which could time out. Its source.txt holds `source`:
    what it is made from. Raises UserError if the folder cannot be written, or if the digests of the
    ranks differ."""
    folder = cache_folder() / kind / digest
    try:
        if folder.is_dir():
            yield folder, None
        else:
            with _locked_draft(folder, source) as draft:
                yield folder, draft
    except OSError as error:
        raise UserError(
            f"cannot write {folder} [{error.strerror or error}]: set TOOLKIT_CACHE to another "
            "folder (export TOOLKIT_CACHE=$(mktemp -d), say), or free space if the disk is full"
        ) from error
    if accelerator is not None:
        launch.require_equal(f"the {kind}", {"source": digest})


@contextlib.contextmanager
def _locked_draft(folder: Path, source: str) -> Iterator[Path | None]:
    """Yields None if another process has filled the folder while this one waited for the lock."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            yield None
            return
        for draft in folder.parent.glob(f".{folder.name}.*-*"):  # of killed builds
            shutil.rmtree(draft, ignore_errors=True)
        with replace_folder(folder) as draft:
            yield draft
            (draft / "source.txt").write_text(source, encoding="utf-8")


def digest_of_file(path: Path) -> str:
    """XXH3-128 of the file's bytes, as hex."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def digest_of_files(folder: Path, files: Iterable[Path]) -> str:
    """A digest of the names (relative to `folder`) and contents of files, without hidden ones."""
    digests = {}
    for path in files:
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            digests[name] = digest_of_file(path)
    lines = [f"{name.as_posix()} {digest}" for name, digest in sorted(digests.items())]
    return xxhash.xxh3_128("\n".join(lines).encode()).hexdigest()


def digest_of_text(text: str) -> str:
    """24 hex digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]
