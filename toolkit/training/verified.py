"""What `toolkit verify` has found out about a recipe, by the digest of its file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.utils.cache import digest_of_file
from toolkit.utils.files import cache_folder, replace_file, templates


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
    """The file in the cache for a recipe of this digest: `{"strategies": {NAME: agrees}}`."""
    return cache_folder() / "verified" / f"{digest}.json"


def read_record(digest: str) -> dict[str, bool]:
    """Strategy -> whether the recipe trains the same under it; lacks those never tried."""
    path = record_path(digest)
    if not path.is_file():
        return {}
    return dict(json.loads(path.read_text("utf-8"))["strategies"])


def write_record(digest: str, strategies: Mapping[str, bool]) -> None:
    """Adds strategies to the record."""
    path = record_path(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"strategies": read_record(digest) | dict(strategies)}
    with replace_file(path) as draft:
        draft.write_text(json.dumps(record), encoding="utf-8")


def is_verified(strategy: str) -> bool:
    """Whether the recipe that runs is known, on the main process's machine, to train under this
    strategy as in one process, or is being verified. A collective."""
    answers = [OTHER_RANDOMNESS in os.environ or _has_record(strategy)]
    return bool(broadcast_object_list(answers)[0])


def verification_note(accelerator: Accelerator) -> str | None:
    """A line for an edited recipe on several processes that no verification covers."""
    digest = script_digest()
    strategy = strategy_name(accelerator)
    if strategy == "single" or digest is None or OTHER_RANDOMNESS in os.environ:
        return None
    shipped = (templates() / "recipes").glob("*.py")
    if _has_record(strategy) or digest in [digest_of_file(path) for path in shipped]:
        return None
    script = Path(str(sys.modules["__main__"].__file__))
    return f"{script.name} is not verified under {strategy}: toolkit verify {script}"


def _has_record(strategy: str) -> bool:
    digest = script_digest()
    return digest is not None and read_record(digest).get(strategy, False)
