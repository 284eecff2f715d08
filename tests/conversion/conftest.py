"""Real checkpoints, made once per session by a few processes."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.runs import groups

# number of processes -> names (see worker.py)
WORLDS = {
    1: ["zero3-bf16-frozen"],
    2: ["zero0", "zero1-bf16", "zero2-bf16", "zero3-bf16", "zero2-bert", "zero3-bert", "zero1-bf16-frozen",
        "zero2-bf16-frozen", "zero3-bf16-frozen", "zero1-excluded", "zero3-excluded", "zero2", "zero1-bf16-optimizer",
        "zero2-bf16-aligned", "zero2-robin", "zero2-bf16-elastic", "zero3-bf16-subgroups", "zero3-bf16-hpz",
        "ddp-safetensors", "ddp-bin", "fsdp-sharded", "fsdp-full", "accelerate-zero2"],
    3: ["zero1-bf16-frozen", "zero1-bf16-optimizer", "zero2-bf16", "zero2-bf16-aligned", "zero3-bf16",
        "zero3-bf16-frozen"],
}  # fmt: skip
NAMES = [f"{name} x{world}" for world, names in WORLDS.items() for name in names]


@pytest.fixture(scope="session")
def checkpoints(tiny_model: Path) -> dict[str, Path]:
    """`zero2-bf16 x3` -> its folder; beside it FOLDER.safetensors. Tests must not write into it."""
    root = Path(os.environ["TOOLKIT_TESTS_FOLDER"], "conversion")
    draft = Path(f"{root}.draft")
    with FileLock(f"{root}.lock"):
        if not root.exists():
            words = {n: [tiny_model, draft / f"x{n}", *names] for n, names in WORLDS.items()}
            groups("tests.conversion.worker", words)
            draft.rename(root)
    return {name: root / name.split()[1] / name.split()[0] for name in NAMES}
