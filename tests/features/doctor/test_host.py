"""Disks, shared memory, locks of builds, and variables of the shell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from toolkit.features.doctor import host

GB = 10**9
Usage = namedtuple("Usage", "total used free percent")
HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(60)"


@pytest.mark.parametrize(("free", "level"), [(50 * GB, "ok"), (5 * GB, "warn"), (GB // 2, "fail")])
def test_room_where_a_run_writes(free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the nearest folder that exists; and in /dev/shm."""
    (tmp_path / "it's").mkdir()
    monkeypatch.setattr(host.psutil, "disk_usage", lambda path: Usage(free, 0, free, 0))
    disk, *shared = host.check_disk(tmp_path / "it's" / "runs" / "today")
    assert (disk.level, f"{tmp_path}/it's " in disk.text) == (level, True)
    assert ["--shm-size=8g" in finding.remedy for finding in shared] == ([True] if free < GB else [])
    monkeypatch.setattr(host.os, "access", lambda *_: False)
    unwritable = next(host.check_disk(tmp_path / "it's"))
    assert "cannot be written" in unwritable.text
    assert """it'"'"'s'`""" in unwritable.remedy


def test_the_lock_of_a_running_build_is_no_fault_and_that_of_a_killed_one_is(tmp_path: Path) -> None:
    """As torch's FileBaton takes it."""
    (tmp_path / "py311_cpu" / "deepspeed_shm_comm").mkdir(parents=True)
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        (alive,) = host.check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
        assert (alive.level, "deepspeed_shm_comm is being built" in alive.text) == ("note", True)
        process.kill()
    deadline = time.monotonic() + 5
    while str(lock) in host._open_files() and time.monotonic() < deadline:
        time.sleep(0.05)
    (stale,) = host.check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert (stale.level, stale.remedy) == ("fail", f"rm {lock}")
    assert "deepspeed_shm_comm" in stale.text


def test_torch_looks_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (none,) = host.check_builds(dict(os.environ))
    assert (none.level, none.text) == ("ok", f"{get_default_build_root()}: no lock is left")


def test_variables_that_a_launcher_left_and_those_of_nccl() -> None:
    assert list(host.check_shell({"PATH": "/bin", "ACCELERATE_LOG_LEVEL": "info"})) == []
    env = {"WORLD_SIZE": "8", "RANK": "3", "ACCELERATE_USE_DEEPSPEED": "true", "TORCHELASTIC_RUN_ID": "\x1b[31mx",
           "PATH": "/bin", "NCCL_IB_DISABLE": "1"}  # fmt: skip
    launcher, variables = host.check_shell(env)
    names = "ACCELERATE_USE_DEEPSPEED RANK TORCHELASTIC_RUN_ID WORLD_SIZE"
    assert (launcher.level, launcher.remedy) == ("warn", f"unset {names}")
    assert "RANK=3" in launcher.text
    assert "\x1b" not in launcher.text
    assert (variables.level, variables.text) == ("note", "NCCL_IB_DISABLE=1")
