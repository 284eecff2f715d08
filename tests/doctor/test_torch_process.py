"""The process that imports torch: what it says, and that it always ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.doctor.lines import free_port, in_thread
from toolkit.doctor.torch_process import TorchProcess

SECONDS = 60.0


def order(rank: int, world: int, port: int) -> dict[str, object]:
    return {"rank": rank, "world_size": world, "address": "127.0.0.1", "port": port, "backends": ["gloo"],
            "megabytes": 1, "seconds": 3.0, "env": {"GLOO_SOCKET_IFNAME": "lo"}}  # fmt: skip


def test_it_says_what_torch_sees_and_ends_with_the_block() -> None:
    import torch

    with TorchProcess() as one:
        seen = one.sees(SECONDS)
        assert seen["version"] == torch.__version__
        assert len(seen["devices"]) == torch.cuda.device_count()
        assert seen["gloo"] is True
        process = psutil.Process(one._process.pid)
    assert not process.is_running()


@pytest.mark.parametrize(("torch", "why"), [
    ("raise ImportError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    ("import os; os.abort()", "signal 6"),
])  # fmt: skip
def test_a_torch_that_breaks_is_told_of(tmp_path: Path, torch: str, why: str) -> None:
    (tmp_path / "torch.py").write_text(torch)
    with TorchProcess({"PYTHONPATH": str(tmp_path)}) as one:
        assert why in one.sees(SECONDS)["broken"]


def test_a_torch_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    started = time.monotonic()
    with TorchProcess({"PYTHONPATH": str(tmp_path)}) as one:
        assert "longer than 1 s" in one.sees(1.0)["broken"]
    assert time.monotonic() - started < 5


def test_two_sum() -> None:
    port = free_port(["127.0.0.1"])
    with TorchProcess() as one, TorchProcess() as other:
        one.sees(SECONDS)
        other.sees(SECONDS)
        there = in_thread(lambda: other.all_reduce(order(1, 2, port), 30.0))
        done = one.all_reduce(order(0, 2, port), 30.0)
        assert done["gloo"]["ok"], done
        assert there.get(timeout=30)["gloo"]["ok"]
        assert 0 < done["gloo"]["seconds"] < 5


def test_an_all_reduce_whose_partner_never_comes_ends() -> None:
    with TorchProcess() as one:
        one.sees(SECONDS)
        started = time.monotonic()
        done = one.all_reduce(order(1, 2, free_port(["127.0.0.1"])), 12.0)
        assert time.monotonic() - started < 14
        assert done["gloo"]["ok"] is False
        assert done["gloo"]["error"]


def test_a_process_that_hangs_in_it_is_left_at_the_limit(tmp_path: Path) -> None:
    with TorchProcess() as one:
        one.sees(SECONDS)
        psutil.Process(one._process.pid).suspend()
        done = one.all_reduce(order(0, 1, free_port(["127.0.0.1"])), 1.0)
        assert "did not end within 1 s" in done["gloo"]["error"]
    assert one._process.poll() is not None


def test_it_ends_when_whoever_started_it_is_killed() -> None:
    code = textwrap.dedent("""
        import time
        from toolkit.doctor.torch_process import TorchProcess
        with TorchProcess() as one:
            one.sees(60.0)
            print(one._process.pid, flush=True)
            time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, 9)
        assert psutil.wait_procs([child], timeout=10)[0]
