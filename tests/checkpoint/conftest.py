"""Real checkpoints, made once per session by a few processes."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.checkpoint.deepspeed_worker import KINDS, Kind
from tests.runs import fork, groups
from toolkit.checkpoint.convert import model_files

# world size -> kinds
WORLDS: Mapping[int, tuple[str, ...]] = {
    1: ("zero0", "zero3-frozen"),
    2: tuple(KINDS),
    3: ("zero2-bf16", "zero3-bf16", "zero1-frozen", "zero1-bf16-optimizer", "zero2-aligned", "zero2-elastic",
        "zero3-subgroups"),
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A checkpoint of DeepSpeed's save_checkpoint after two optimizer steps. Tests must not write into it."""

    folder: Path
    """With `latest` and the tag's folder. Beside it FOLDER.safetensors is what was in memory (`elastic_ways.truth_of`),
    and for kinds with `later` FOLDER-later the save one step later."""
    kind: Kind
    world: int


def names() -> list[str]:
    """The keys of `deepspeed_checkpoints`: `zero2-bf16 x2`, ..."""
    return [f"{name} x{world}" for world, kinds in WORLDS.items() for name in kinds]


@pytest.fixture
def made(name: str, deepspeed_checkpoints: dict[str, Made]) -> Made:
    return deepspeed_checkpoints[name]


@pytest.fixture
def built_in_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert --verify` builds the model in a fork of a process with warm imports, instead of in a new one."""

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        *_, program, folder = command
        (tmp_path / "build.py").write_text(program)
        with fork([tmp_path / "build.py", folder]) as process:
            done = process.finish(300).succeeded()
        return subprocess.CompletedProcess(command, done.code, done.out, done.err)

    monkeypatch.setattr(model_files.subprocess, "run", run)


@pytest.fixture(scope="session")
def deepspeed_checkpoints(tiny_model: Path) -> dict[str, Made]:
    """Real checkpoints by `KIND xWORLD`, made once for all workers of a session."""
    root = Path(os.environ["TOOLKIT_TESTS_FOLDER"], "deepspeed")
    with FileLock(f"{root}.lock"):
        if not root.exists():
            words = {world: [tiny_model, f"{root}.draft/x{world}", *kinds] for world, kinds in WORLDS.items()}
            groups("tests.checkpoint.deepspeed_worker", words)
            Path(f"{root}.draft").rename(root)
    return {
        f"{name} x{world}": Made(root / f"x{world}" / name, KINDS[name], world)
        for world, kinds in WORLDS.items()
        for name in kinds
    }
