"""toolkit/checkpoint/disks.py: who shares a disk with whom, from what each process tells."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from accelerate import Accelerator

from toolkit.checkpoint.disks import Disks, View, disks_of, find_disks


def ranks(disks: Disks) -> list[tuple[int, ...]]:
    return [disk.ranks for disk in disks.all]


def views(machines: str, seen: Sequence[Sequence[int]] | None = None) -> list[View]:
    """A letter for each process's machine, and the ranks whose probes it sees."""
    found = seen or [()] * len(machines)
    return [View(f"host{m}", m, f"/data/{m}", tuple(s)) for m, s in zip(machines, found, strict=True)]


@pytest.mark.parametrize(
    ("machines", "seen", "expected"),
    [
        ("A", None, [(0,)]),
        ("AAA", None, [(0, 1, 2)]),
        ("AB", [[0], [1]], [(0,), (1,)]),
        ("AB", [[0, 1], [0, 1]], [(0, 1)]),
        ("AB", [[0], [0, 1]], [(0, 1)]),  # one that cannot write there, or sees the other's file late
        ("AB", [[], []], [(0,), (1,)]),  # nobody can write: each reads what it finds
        ("AABB", [[0], [0], [2], [2]], [(0, 1), (2, 3)]),
        ("ABAB", [[0], [1], [0], [1]], [(0, 2), (1, 3)]),
        ("AABB", [[0], [0], [2], [0, 2]], [(0, 1, 2, 3)]),
        ("ABC", [[0], [1, 2], [1, 2]], [(0,), (1, 2)]),
        ("ABC", [[0, 2], [1], [0, 2]], [(0, 2), (1,)]),
        ("ABC", [[0, 1], [0, 1, 2], [2]], [(0, 1, 2)]),
        ("ABCD", [[0], [1, 3], [0, 2], [3]], [(0, 2), (1, 3)]),
    ],
)
def test_groups(machines: str, seen: list[list[int]] | None, expected: list[tuple[int, ...]]) -> None:
    """Alike for each process; rank 0's disk first; the lowest rank of each is its owner."""
    for rank in range(len(machines)):
        disks = disks_of(views(machines, seen), rank)
        assert ranks(disks) == expected
        assert rank in disks.mine.ranks
        assert [disk.owner for disk in disks.all] == [group[0] for group in expected]
        assert disks.shared == (len(expected) == 1)
        assert disks.first == (rank in expected[0])
        assert disks.owns_another == (rank in [group[0] for group in expected[1:]])


def test_a_disk_is_called_as_its_owner_calls_it() -> None:
    disks = disks_of(views("ABB", [[0], [1], [1]]), 2)
    assert [(disk.host, disk.folder) for disk in disks.all] == [("hostA", "/data/A"), ("hostB", "/data/B")]
    assert disks.host_of(1) == "hostB"


def test_one_process_makes_nothing(tmp_path: Path) -> None:
    disks = find_disks(Accelerator(cpu=True), tmp_path / "checkpoints")
    assert disks.shared
    assert disks.first
    assert not disks.owns_another
    assert disks.mine.host == socket.gethostname()
    assert disks.mine.folder == str(tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()
