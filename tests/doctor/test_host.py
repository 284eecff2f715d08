"""Memory, disks, limits and the clock."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from toolkit.doctor import host
from toolkit.doctor.finding import worst
from toolkit.doctor.host import Disk

GB = 10**9


def test_memory_of_the_machine_and_of_its_container() -> None:
    assert host.memory(30 * GB, 64 * GB, None, 8).level == "ok"
    inside = host.memory(30 * GB, 64 * GB, 4 * GB, 1)
    assert inside.text.startswith("1 core; 4.0 GB of 4.0 GB memory free (the container's limit)")
    assert host.memory(GB, 64 * GB, None, 8).level == "warn"


def test_disks_of_one_file_system_are_one_line() -> None:
    (one,) = host.disks([Disk("output", "/a", 50 * GB, 7), Disk("tokens", "/b", 50 * GB, 7)])
    assert one.level == "ok"
    assert one.text == "50.0 GB free for output, tokens (/a, /b)"


@pytest.mark.parametrize(("disk", "level", "words"), [
    (Disk("output", "/a", 5 * GB, 7), "warn", "5.0 GB free"),
    (Disk("output", "/a", GB // 2, 7), "fail", "500 MB free"),
    (Disk("output", "/a", 50 * GB, 7, writable=False), "fail", "cannot be written"),
    (Disk("output", "/a", 50 * GB, 7, file_slots_left=False), "fail", "no inode"),
])  # fmt: skip
def test_disks_without_room(disk: Disk, level: str, words: str) -> None:
    found = host.disks([disk, Disk("tokens", "/b", 50 * GB, 8)])
    assert [finding.level for finding in found] == ["ok", level]
    assert words in found[1].text
    assert "/a" in found[1].remedy


def test_a_folder_that_is_still_to_be_made(tmp_path: Path) -> None:
    found = host._disk("output", tmp_path / "runs" / "today")
    assert found is not None
    assert found.folder == str(tmp_path)


def test_dockers_shared_memory_is_too_small() -> None:
    (small,) = host.shared_memory((64 << 20, 64 << 20))
    assert small.level == "warn"
    assert "--shm-size=8g" in small.remedy
    assert worst(host.shared_memory((8 << 30, 8 << 30))) == "ok"
    (full,) = host.shared_memory((8 << 30, 1 << 20))
    assert (full.level, "/dev/shm" in full.remedy) == ("warn", True)
    assert host.shared_memory(None) == []


def test_the_limit_of_open_files() -> None:
    (raised,) = host.open_files(1024, 1 << 20)
    assert (raised.level, raised.remedy) == ("warn", "ulimit -n 65536")
    assert host.open_files(1024, 8000)[0].remedy == "ulimit -n 8000"
    assert "limits.conf" in host.open_files(1024, 1024)[0].remedy
    assert host.open_files(1024, resource.RLIM_INFINITY)[0].remedy == "ulimit -n 65536"
    assert host.open_files(4096, 4096)[0].level == "ok"
    assert host.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY)[0].level == "ok"


def test_infiniband_pins_memory() -> None:
    assert host.locked_memory(64 << 10, []) == []
    (short,) = host.locked_memory(64 << 10, ["mlx5_0"])
    assert short.level == "warn"
    assert "NCCL_IB_DISABLE=1" in short.remedy
    assert host.locked_memory(resource.RLIM_INFINITY, ["mlx5_0"])[0].level == "ok"


def test_the_clock() -> None:
    assert host.clock(None) == []
    assert host.clock(True)[0].level == "ok"
    assert host.clock(False)[0].remedy == "sudo timedatectl set-ntp true"


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    names = {finding.name for finding in host.check(tmp_path / "runs", tmp_path / "cache")}
    assert {"memory", "open files"} <= names
