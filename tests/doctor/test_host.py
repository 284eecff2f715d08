"""Disks, shared memory, locks of builds, and variables of the shell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.doctor import host

GB = 10**9
Usage = namedtuple("Usage", "total used free percent")
HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(60)"


@pytest.mark.parametrize(("free", "level"), [(50 * GB, "ok"), (5 * GB, "warn"), (GB // 2, "fail")])
def test_room_where_a_run_writes(free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the nearest folder that exists."""
    monkeypatch.setattr(host.psutil, "disk_usage", lambda path: Usage(99 * GB, 0, free, 0))
    found = host.check_disk("output", tmp_path / "runs" / "today")
    assert (found.level, f"{tmp_path} (output)" in found.text) == (level, True)
    monkeypatch.setattr(host.os, "access", lambda *_: False)
    assert "cannot be written" in host.check_disk("output", tmp_path).text


@pytest.mark.parametrize(("total", "free", "level"), [
    (64 << 20, 64 << 20, "warn"), (8 << 30, 8 << 30, "ok"), (8 << 30, 1 << 20, "warn"),
])  # fmt: skip
def test_shared_memory(total: int, free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.psutil, "disk_usage", lambda path: Usage(total, 0, free, 0))
    (found,) = host.check_shared_memory(str(tmp_path))
    assert (found.level, "--shm-size=8g" in found.remedy) == (level, level == "warn")
    assert host.check_shared_memory("/no/such") == []


# --- locks of builds


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A lock as torch's FileBaton takes it, and who has it."""
    (tmp_path / "py311_cpu" / "deepspeed_shm_comm").mkdir(parents=True)
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield lock, process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_lock_that_is_held_is_no_fault_and_one_that_is_left_is(tmp_path: Path, held: tuple[Path, int]) -> None:
    lock, pid = held
    (alive,) = host.check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert (alive.level, f"is being built by process {pid}" in alive.text) == ("note", True)
    os.kill(pid, 9)
    deadline = time.monotonic() + 5
    while host._holders({str(lock)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    (stale,) = host.check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert (stale.level, stale.remedy) == ("fail", f"rm {lock}")
    assert "deepspeed_shm_comm" in stale.text


def test_a_cache_without_locks(tmp_path: Path) -> None:
    (only,) = host.check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert (only.level, only.text) == ("ok", f"{tmp_path}: no lock is left")
    (none,) = host.check_builds({"XDG_CACHE_HOME": str(tmp_path)})
    assert none.text == f"{tmp_path}/torch_extensions: nothing has been built yet"


def test_torch_looks_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (none,) = host.check_builds(dict(os.environ))
    assert none.text.startswith(get_default_build_root())


# --- the shell


def test_a_clean_shell() -> None:
    assert host.check_shell({"PATH": "/bin", "HF_HOME": "/nowhere"}, config_given=False) == []


def test_variables_that_a_launcher_left_and_those_of_nccl() -> None:
    env = {"WORLD_SIZE": "8", "RANK": "3", "ACCELERATE_USE_DEEPSPEED": "true", "TORCHELASTIC_RUN_ID": "x",
           "ACCELERATE_LOG_LEVEL": "info", "PATH": "/bin", "NCCL_IB_DISABLE": "1", "HF_HOME": "/nowhere"}  # fmt: skip
    left, told = host.check_shell(env, config_given=False)
    assert (left.level, left.remedy) == ("warn", "unset ACCELERATE_USE_DEEPSPEED RANK TORCHELASTIC_RUN_ID WORLD_SIZE")
    assert "RANK=3" in left.text
    assert (told.level, told.text) == ("note", "NCCL_IB_DISABLE=1")


def test_accelerates_silent_default(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_processes: 4")
    env = {"HF_HOME": str(tmp_path)}
    (note,) = host.check_shell(env, config_given=False)
    assert (note.level, str(tmp_path) in note.text) == ("note", True)
    assert host.check_shell(env, config_given=True) == []
