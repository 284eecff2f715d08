"""toolkit/checkpoint/folder.py: what counts as a checkpoint, which are removed, and what best and last name. (Promise
3.)"""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from toolkit.checkpoint import folder as folders

TABLES = {folders.WEIGHTS_FILE: {"weight": (torch.float32, (3,))}, folders.OPTIMIZER_FILE: {}}


def save(checkpoints: Path, step: int, at: float | None = None, **facts: Any) -> Path:
    """A small checkpoint, as if it was saved `at` that time."""
    folder = folders.step_folder(checkpoints, step)
    time = {} if at is None else {"saved_at": at}

    def write_others(draft: Path) -> None:
        (draft / "model").mkdir()
        (draft / "model" / "config.json").write_text("{}")

    folders.save(folder, TABLES, [torch.ones(3)], {"step": step, **time, **facts}, write_others)
    return folder


def names_in(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


OLD = json.dumps({"format": 1, "files": {}})
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda folder: flip(folder / "weights.safetensors"),
    "a flipped bit of the state": lambda folder: flip(folder / "state.json"),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "a missing file": lambda folder: (folder / "model" / "config.json").unlink(),
    "a truncated file": lambda folder: (folder / "optimizer.safetensors").write_bytes(b"123"),
    "another format": lambda folder: (folder / "state.json").write_text(OLD),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_noticed(tmp_path: Path, what: str) -> None:
    older, folder = save(tmp_path, 1), save(tmp_path, 2)
    assert folders.find_fault(folder) == ""
    DAMAGE[what](folder)
    assert str(folder) in folders.find_fault(folder)
    assert folders.newest_first(tmp_path) == [folder, older]


def test_the_newest_is_by_time_not_by_step(tmp_path: Path) -> None:
    """A run that resumed step 2 continues from what it saved then, not from step 8, saved in 2096."""
    old, new = save(tmp_path, 8, at=4e9), save(tmp_path, 4)
    assert folders.newest_first(tmp_path) == folders.readable(tmp_path) == [new, old]


@pytest.mark.parametrize("has_links", [True, False])
def test_the_best_is_never_removed(has_links: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Also on a disk without symbolic links: Google Drive, exFAT, SMB."""
    if not has_links:
        monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError(errno.EPERM, "no")))
    for step in range(1, 6):
        save(tmp_path, step, at=float(step))
    (tmp_path / "notes").mkdir()  # not of a run
    folders.set_links(tmp_path, best_step=2)
    folders.prune(tmp_path, keep=2, best_step=2)
    links = ["best", "last"] if has_links else []
    assert names_in(tmp_path) == [*links, "notes", *(f"step-{step:08d}" for step in (2, 4, 5))]


def test_a_checkpoint_on_another_disk_keeps_its_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 1)
    there = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(there)
    assert folders.find_fault(folder) == ""
    folders.remove(folder)
    assert names_in(tmp_path / "run") == []
    assert folders.find_fault(there) == ""
