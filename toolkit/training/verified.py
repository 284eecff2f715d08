"""What `toolkit verify` has found out about a recipe, by the digest of its file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.launch.strategy import strategy_name
from toolkit.utils.cache import digest_of_file
from toolkit.utils.files import cache_folder, templates


def script_digest() -> str | None:
    """Of the recipe that runs; None in a notebook."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if not script or not Path(script).is_file():
        return None
    return digest_of_file(Path(script))


def record_path(digest: str, strategy: str) -> Path:
    """The empty file in the cache that says: the recipe of this digest trains under this strategy
    as in one process."""
    return cache_folder() / "verified" / digest / strategy


def is_verified(strategy: str) -> bool:
    """Whether the recipe that runs is known, on the main process's machine, to train under this
    strategy as in one process, or is being verified. A collective."""
    return bool(broadcast_object_list([_has_record(strategy)])[0])


def verification_note(accelerator: Accelerator) -> str | None:
    """A line for an edited recipe on several processes that no verification covers."""
    digest = script_digest()
    strategy = strategy_name(accelerator)
    shipped = [digest_of_file(path) for path in (templates() / "recipes").glob("*.py")]
    if strategy == "single" or digest in (None, *shipped) or _has_record(strategy):
        return None
    script = Path(str(sys.modules["__main__"].__file__))
    return f"{script.name} is not verified under {strategy}: toolkit verify {script}"


def _has_record(strategy: str) -> bool:
    digest = script_digest()
    has_record = digest is not None and record_path(digest, strategy).exists()
    return has_record or OTHER_RANDOMNESS in os.environ
