"""The command: its memory, what is left after a full disk or a signal, its options. (Promises 4 and 5.)"""

import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.runs import ROOT, begin, fork, start

BIG = 1 << 28
"""Bytes of a model of 32 tensors."""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "model.pt"
    torch.save({f"layer.{number}.weight": torch.randn(BIG // 128, 1) for number in range(32)}, path)
    return path


def test_its_memory_is_not_the_models(big: Path, tmp_path: Path) -> None:
    """Anonymous memory beyond that of torch itself: some copies of a tensor, of 32."""
    peaks = {}
    for name, code in {
        "torch": "import time, torch, toolkit.conversion.convert; time.sleep(1)",
        "convert": "",
    }.items():
        command = ["-m", "toolkit", "convert", str(big), str(tmp_path / "out"), "--dtype", "bf16"]
        peak = 0
        with begin(
            [sys.executable, *(["-c", code] if code else command)], {"PYTHONPATH": str(ROOT)}
        ) as process:
            while process.poll() is None:
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max(
                    peak,
                    *(
                        int(line.split()[1]) * 1024
                        for line in status.splitlines()
                        if "RssAnon" in line
                    ),
                    0,
                )
                time.sleep(0.01)
            process.finish(60).succeeded()
        peaks[name] = peak
    assert peaks["convert"] - peaks["torch"] < BIG // 4, peaks


def test_a_full_disk_leaves_nothing(big: Path, tmp_path: Path) -> None:
    with fork(
        ["-m", "toolkit", "convert", big, tmp_path / "out"], largest_file=BIG // 2
    ) as process:
        done = process.finish(60)
    assert f"cannot write {tmp_path / 'out'}" in done.err
    assert done.code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(sent: signal.Signals, big: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolkit", "convert", str(big), str(tmp_path / "out")]
    with begin(command, {"PYTHONPATH": str(ROOT)}) as process:
        while not list(tmp_path.glob(".out.draft-*/*.safetensors")):
            time.sleep(0.002)
        process.send_signal(sent)
        process.finish(60)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "model.pt")
    start(["toolkit", "convert", tmp_path / "model.pt"]).says_in_one_line(
        "toolkit convert CHECKPOINT OUT"
    )
    out = start(["toolkit", "convert", tmp_path / "model.pt", tmp_path / "out"]).succeeded().out
    assert "weights only" in out
    assert f"wrote {tmp_path / 'out'}: 8 bytes of fp32" in out
