"""What `toolkit verify` has found out about a recipe, by the digest of its file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accelerate import Accelerator

from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.utils.cache import digest_of_file
from toolkit.utils.files import cache_folder, templates


def script_digest() -> str | None:
    """Of the recipe that runs; None in a notebook."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if not script or not Path(script).is_file():
        return None
    return digest_of_file(Path(script))


def strategy_name(accelerator: Accelerator) -> str:
    """As in accelerate_configs/: single, ddp, zero1, zero2, zero3 or fsdp2."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin:
        return f"zero{plugin.zero_stage}"
    if accelerator.is_fsdp2:
        return "fsdp2"
    return "ddp" if accelerator.num_processes > 1 else "single"


def record_path(digest: str) -> Path:
    """The file in the cache with what agreed for a recipe of this digest."""
    return cache_folder() / "verified" / f"{digest}.json"


def is_verified(strategy: str) -> bool:
    """Whether the recipe that runs has trained under this strategy as in one process, or is being
    verified."""
    digest = script_digest()
    if OTHER_RANDOMNESS in os.environ or digest is None:
        return OTHER_RANDOMNESS in os.environ
    path = record_path(digest)
    return path.is_file() and strategy in json.loads(path.read_text("utf-8"))["strategies"]


def verification_note(accelerator: Accelerator) -> str | None:
    """A line for an edited recipe on several processes that no verification covers."""
    strategy = strategy_name(accelerator)
    digest = script_digest()
    if accelerator.num_processes == 1 or digest is None or is_verified(strategy):
        return None
    shipped = (templates() / "recipes").glob("*.py")
    if digest in [digest_of_file(path) for path in shipped]:
        return None
    script = sys.modules["__main__"].__file__
    return f"{Path(str(script)).name} is not verified under {strategy}: toolkit verify {script}"
