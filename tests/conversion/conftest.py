"""Real checkpoints, made once per session by a few processes."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conversion.worker import KINDS, OTHERS
from tests.runs import groups

# number of processes -> kinds
WORLDS: dict[int, tuple[str, ...]] = {
    1: ("zero3-frozen",),
    2: (*KINDS, *OTHERS),
    3: (
        "zero1-frozen",
        "zero1-bf16-optimizer",
        "zero2-bf16",
        "zero2-aligned",
        "zero3-bf16",
        "zero3-frozen",
    ),
}
NAMES = [f"{name} x{world}" for world, names in WORLDS.items() for name in names]


@pytest.fixture(scope="session")
def checkpoints(tiny_model: Path) -> dict[str, Path]:
    """`zero2-bf16 x3` -> its folder; beside it FOLDER.safetensors. Tests must not write into it."""
    root = Path(os.environ["TOOLKIT_TESTS_FOLDER"], "conversion")
    with FileLock(f"{root}.lock"):
        if not root.exists():
            words = {
                world: [tiny_model, f"{root}.draft/x{world}", *names]
                for world, names in WORLDS.items()
            }
            groups("tests.conversion.worker", words)
            Path(f"{root}.draft").rename(root)
    return {name: root / name.split()[1] / name.split()[0] for name in NAMES}
