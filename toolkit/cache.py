"""What is made once per machine and kept: tokens, and models made longer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from filelock import FileLock

from toolkit import launch
from toolkit.files import replace_folder

if TYPE_CHECKING:
    from accelerate import Accelerator

_CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """$TOOLKIT_CACHE, or ~/.cache/finetune-toolkit."""
    return Path(os.environ.get("TOOLKIT_CACHE") or Path.home() / ".cache" / "finetune-toolkit")


def made_once(kind: str, digest: str, make: Callable[[Path], None], accelerator: Accelerator | None) -> Path:
    """The cache folder `kind`/`digest`, made by one process per machine beside its final name and then
    renamed: a killed build is never taken for one. `make` must write a `meta.json`.

    Who comes second waits on a file lock, not in a collective, so that no time limit of the process group
    counts. Raises UserError where processes asked for different digests.
    """
    folder = cache_folder() / kind / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "meta.json").is_file():
        with FileLock(f"{folder}.lock"):
            if not (folder / "meta.json").is_file():
                for dead in folder.parent.glob(f".{folder.name}.draft-*"):
                    shutil.rmtree(dead, ignore_errors=True)  # of a build that was killed: the lock is ours
                with replace_folder(folder, overwrite=True, flush=False) as draft:
                    make(draft)
    if accelerator is not None:
        launch.wait_for_all(accelerator, f"the {kind} {digest}")
        launch.same_everywhere(accelerator, f"the {kind}", {"what they were made of": digest})
    return folder


def digest_of_file(path: Path) -> str:
    """xxh3 of the file's bytes: the same content is the same file, wherever it lies."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
