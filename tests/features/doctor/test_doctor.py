"""Promises: `toolkit doctor` names each fault of this machine, with the command that mends it; on two
hosts it says whether they find each other and sum numbers, and if not, why."""

import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.hosts import ADDRESSES, TwoHosts
from tests.runs import ROOT, Process, start
from toolkit.features.doctor import machine

GB = 10**9
PORT = 29600
# to import torch on a busy machine, twice
SPARE_SECONDS = 60.0
DOCTOR = [sys.executable, "-m", "toolkit", "doctor"]
LINE = re.compile(r"  (ok|note|warn|FAIL) +(\S.*?)  +(\S.*(?:\n +-> .*)?)")


def findings_in(out: str) -> dict[str, tuple[str, str]]:
    """Name -> level, and text with the remedy below it."""
    return {name: (level, text) for level, name, text in LINE.findall(out)}


def test_this_machine(tmp_path: Path) -> None:
    done = start([*DOCTOR, "--output_dir", tmp_path / "run"], seconds=90).succeeded()
    assert done.out.startswith(socket.gethostname())
    assert {"torch", "shared memory", "disk"} <= findings_in(done.out).keys()
    assert "failures: 0" in done.out
    assert not (tmp_path / "run").exists()


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    done = start(DOCTOR, 90, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    level, text = findings_in(done.out)["torch"]
    assert (done.code, level) == (1, "FAIL")
    assert "libcudart.so.12" in text
    assert "-> pip install" in text


NO_KERNEL = RuntimeError("CUDA error: no kernel image is available for execution on the device")
MISMATCH = "echo 'Driver/library version mismatch'; exit 18"


@pytest.mark.parametrize(
    ("script", "gpus", "name", "says", "remedy"),
    [
        ("echo 550.54.15; echo 550.54.15", 0, "torch", "sees no GPU of 2", ""),
        (MISMATCH, 0, "driver", "version mismatch", "dmesg"),
        ("echo 580", 1, "gpu 0", "Tesla V100", "older CUDA"),  # with a build for CUDA 13
    ],
)
def test_the_driver(
    script: str, gpus: int, name: str, says: str, remedy: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    gpu = {"is_available": bool(gpus), "device_count": gpus, "get_device_name": "Tesla V100"}
    for each, value in gpu.items():
        monkeypatch.setattr(torch.cuda, each, Mock(return_value=value))
    monkeypatch.setattr(torch, "ones", Mock(side_effect=NO_KERNEL))
    (finding,) = (each for each in machine.check_gpus() if each.name == name)
    assert (finding.level, says in finding.text) == ("FAIL", True)
    assert finding.remedy
    assert remedy in finding.remedy


@pytest.mark.parametrize(("free", "level"), [(50 * GB, "ok"), (5 * GB, "warn"), (GB // 2, "FAIL")])
def test_disk_and_shared_memory(free: int, level: str, tmp_path: Path, monkeypatch: Any) -> None:
    (folder := tmp_path / "it's").mkdir()
    usage = SimpleNamespace(total=free, free=free)
    monkeypatch.setattr(machine.psutil, "disk_usage", lambda path: usage)
    disk = machine.check_disk(folder / "runs" / "today")
    assert (disk.level, f"{folder} " in disk.text) == (level, True)
    (shared,) = machine.check_shared_memory()
    assert shared.level == ("warn" if free < GB else "ok")
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    unwritable = machine.check_disk(folder)
    assert unwritable.level == "FAIL"
    assert """it'"'"'s'`""" in unwritable.remedy


# --- two hosts


def doctors(hosts: TwoHosts, timeout: float = 20.0, **of_b: Any) -> dict[str, Any]:
    """Runs one on each host; what each found. `of_b` goes to `TwoHosts.start`."""
    words = [*DOCTOR, "--main_process_ip", ADDRESSES["a"], "--rendezvous_timeout", str(timeout)]
    running = {"a": hosts.start("a", words), "b": hosts.start("b", words, **of_b)}
    return {name: findings(process, timeout) for name, process in running.items()}


def findings(process: Process, timeout: float) -> dict[str, tuple[str, str]]:
    """The exit code is 1 after a FAIL, else 0."""
    done = process.finish(timeout + SPARE_SECONDS)
    found = findings_in(done.out)
    levels = {level for level, _ in found.values()}
    assert done.code == int("FAIL" in levels), done.out + done.err
    return found


@pytest.mark.namespaces
def test_two_good_hosts_and_strangers_on_the_port(hosts: TwoHosts) -> None:
    """They send nonsense from an address of the run, and stay."""
    connect = f"exec {{fd}}<>/dev/tcp/{ADDRESSES['a']}/{PORT}"
    nonsense = r"printf '\xff\xff\xff\xffGET / HTTP/1.0' >&$fd"
    command = f"while true; do {connect} && {nonsense}; sleep 0.2; done"
    stranger = hosts.start("b", ["bash", "-c", command])
    reports = doctors(hosts)
    stranger.kill_session()
    for found in reports.values():
        assert found["machines"][1].startswith("hostA, hostB found each other")
        assert "16 MB summed over 2 machines at " in found["gloo"][1]
        assert found["gloo"][0] != "FAIL"


@pytest.mark.namespaces
def test_hosts_with_different_libraries(hosts: TwoHosts, tmp_path: Path) -> None:
    newer = tmp_path / "extra" / "peft-99.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 99.0\n")
    reports = doctors(hosts, env={"PYTHONPATH": str(tmp_path / "extra")}, fresh=True)
    for found in reports.values():
        level, text = found["machines"]
        assert (level, " and 99.0 on hostB" in text) == ("FAIL", True)


@pytest.mark.namespaces
def test_a_port_that_drops_packets_is_told_from_one_that_refuses(hosts: TwoHosts) -> None:
    hosts.block("a", PORT)
    try:
        reports = doctors(hosts, timeout=5)
    finally:
        hosts.heal()
    dropped = reports["b"]["machines"][1]
    assert "10.77.0.1:29600: no answer" in dropped
    assert "on 10.77.0.1, `sudo ufw allow from 10.77.0.2`" in dropped
    assert "machine 1 did not come" in reports["a"]["machines"][1]
    words = [*DOCTOR, "--main_process_ip", ADDRESSES["a"], "--rendezvous_timeout", "3"]
    alone = findings(hosts.start("b", words), 3)["machines"][1]
    assert "nothing listens on this port" in alone
    assert "start the other machine too" in alone
