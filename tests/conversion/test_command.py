"""The command: its memory, what is left after a full disk or a signal. (Promises 4 and 5.)"""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import ROOT, Process, begin, fork

BIG = 1 << 28
"""Bytes of a model of 32 tensors."""


@pytest.fixture(scope="module")
def big(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("big") / "model.pt"
    torch.save({f"layer.{number}.weight": torch.randn(BIG // 128, 1) for number in range(32)}, path)
    return path


def python(*words: Any) -> Process:
    return begin([sys.executable, *words], {"PYTHONPATH": str(ROOT)})


def peak_of(*words: Any) -> int:
    """The largest anonymous memory of a Python process, in bytes."""
    peak = 0
    with python(*words) as process:
        while process.poll() is None:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if "RssAnon" in line:
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.01)
        process.finish().succeeded()
    return peak


def test_its_memory_is_not_the_models(big: Path, tmp_path: Path) -> None:
    """Beyond that of torch itself: some copies of a tensor, of 32."""
    torchs = peak_of("-c", "import time, torch, toolkit.conversion.convert; time.sleep(1)")
    whole = peak_of("-m", "toolkit", "convert", big, tmp_path / "out", "--dtype", "bf16")
    assert whole - torchs < BIG // 4
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > BIG // 2


def test_a_full_disk_leaves_nothing(big: Path, tmp_path: Path) -> None:
    command = ["-m", "toolkit", "convert", big, tmp_path / "out"]
    with fork(command, largest_file=BIG // 2) as process:
        process.finish().says_in_one_line(str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(sent: signal.Signals, big: Path, tmp_path: Path) -> None:
    with python("-m", "toolkit", "convert", big, tmp_path / "out") as process:
        while not list(tmp_path.glob(".out.draft-*/*.safetensors")):
            time.sleep(0.002)
        process.send_signal(sent)
        process.finish()
    assert list(tmp_path.iterdir()) == []
