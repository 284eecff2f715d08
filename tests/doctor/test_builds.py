"""A lock that a killed build has left, and one that is held."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.doctor import builds
from toolkit.doctor.builds import Lock

HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(60)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "py311_cpu" / "deepspeed_shm_comm").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def held(folder: Path) -> Iterator[tuple[Path, int]]:
    """A lock as torch's FileBaton takes it, and who has it."""
    lock = folder / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield lock, process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_cache_without_locks(folder: Path) -> None:
    (only,) = builds.check({"TORCH_EXTENSIONS_DIR": str(folder)})
    assert (only.level, only.text) == ("ok", f"{folder}: no lock is left")
    (none,) = builds.check({"TORCH_EXTENSIONS_DIR": str(folder / "nowhere")})
    assert "nothing has been built yet" in none.text


def test_a_lock_that_is_held_is_no_fault_and_one_that_is_left_is(folder: Path, held: tuple[Path, int]) -> None:
    lock, pid = held
    (alive,) = builds.check({"TORCH_EXTENSIONS_DIR": str(folder)})
    assert alive.level == "note"
    assert f"is being built by process {pid}" in alive.text
    os.kill(pid, 9)
    deadline = time.monotonic() + 5
    while builds.find_locks(folder)[0].holder and time.monotonic() < deadline:
        time.sleep(0.05)
    (stale,) = builds.check({"TORCH_EXTENSIONS_DIR": str(folder)})
    assert (stale.level, stale.remedy) == ("fail", f"rm {lock}")
    assert "deepspeed_shm_comm" in stale.text


def test_a_lock_beside_a_working_compiler_is_alive() -> None:
    (alive,) = builds.findings(Path("/c"), [Lock(Path("/c/op/lock"), 300.0, None, 4712)])
    assert (alive.level, "process 4712" in alive.text) == ("note", True)


def test_the_line_to_type_can_be_typed() -> None:
    (stale,) = builds.findings(Path("/my cache"), [Lock(Path("/my cache/op/lock"), 3600.0, None, None)])
    assert stale.remedy == "rm '/my cache/op/lock'"
    assert "60 min ago" in stale.text
    assert "another machine" not in stale.text
    assert "another machine" in builds.findings(Path("/c"), [Lock(Path("/c/op/lock"), 30.0, None, None)])[0].text


def test_where_the_cache_is() -> None:
    assert builds.cache_folder({"TORCH_EXTENSIONS_DIR": "/x"}) == Path("/x")
    assert builds.cache_folder({"XDG_CACHE_HOME": "/y"}) == Path("/y/torch_extensions")
    assert builds.cache_folder({}) == Path.home() / ".cache" / "torch_extensions"


def test_torch_looks_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert Path(get_default_build_root()) == builds.cache_folder(dict(os.environ)).resolve()
