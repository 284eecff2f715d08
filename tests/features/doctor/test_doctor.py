"""Promises: `toolkit doctor` names each fault of this machine, with the command that mends it."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.features.doctor.printed import findings_in
from tests.runs import Finished, start
from toolkit.features.doctor import machine
from toolkit.features.doctor.machine import Finding

GB = 10**9


def doctor(*words: str | Path, **options: object) -> Finished:
    return start([sys.executable, "-m", "toolkit", "doctor", *words], seconds=90, **options)


def gpus() -> dict[str, Finding]:
    return {finding.name: finding for finding in machine.check_gpus()}


def test_this_machine(tmp_path: Path) -> None:
    done = doctor("--output_dir", tmp_path / "run").succeeded()
    assert done.out.startswith(socket.gethostname())
    assert {"torch", "shared memory", "disk"} <= findings_in(done.out).keys()
    assert "failures: 0" in done.out
    assert not (tmp_path / "run").exists()


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    done = doctor(env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"})
    torch_line = findings_in(done.out)["torch"]
    assert (done.code, torch_line.level) == (1, "FAIL")
    assert "libcudart.so.12" in torch_line.text
    assert torch_line.remedy.startswith("pip install")


DRIVERS = {
    "sees no GPU of 2": ("echo 550.54.15; echo 550.54.15", "torch"),
    "version mismatch": ("echo 'Driver/library version mismatch'; exit 18", "driver"),
}


@pytest.mark.parametrize("text", DRIVERS)
def test_the_driver(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, name = DRIVERS[text]
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = gpus()[name]
    assert (finding.level, text in finding.text, bool(finding.remedy)) == ("FAIL", True, True)


def test_a_gpu_for_which_torch_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """V100 with a build for CUDA 13."""

    def no_kernel(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch, "ones", no_kernel)
    finding = gpus()["gpu 0"]
    assert (finding.level, "Tesla V100" in finding.text) == ("FAIL", True)
    assert "older CUDA" in finding.remedy


@pytest.mark.parametrize(("free", "level"), [(50 * GB, "ok"), (5 * GB, "warn"), (GB // 2, "FAIL")])
def test_disk_and_shared_memory(
    free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "it's").mkdir()
    usage = SimpleNamespace(total=free, free=free)
    monkeypatch.setattr(machine.psutil, "disk_usage", lambda path: usage)
    disk = machine.check_disk(tmp_path / "it's" / "runs" / "today")
    assert (disk.level, f"{tmp_path}/it's " in disk.text) == (level, True)
    (shared,) = machine.check_shared_memory()
    assert shared.level == ("warn" if free < GB else "ok")
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    unwritable = machine.check_disk(tmp_path / "it's")
    assert unwritable.level == "FAIL"
    assert """it'"'"'s'`""" in unwritable.remedy
