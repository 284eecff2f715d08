"""GPUs as nvidia-smi and torch tell of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.doctor import devices
from toolkit.doctor.devices import Driver, Gpu, Holder
from toolkit.doctor.finding import Finding, worst

GB = 1 << 30
GPUS = (Gpu(0, "NVIDIA A100", 80 * GB, 500 << 20, "GPU-a"), Gpu(1, "NVIDIA A100", 80 * GB, 40 * GB, "GPU-b"))
CPU_TORCH: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "available": False, "accelerator": "cpu",
                             "devices": [], "nccl": None, "gloo": True, "warnings": []}  # fmt: skip
GPU_TORCH: dict[str, Any] = {**CPU_TORCH, "version": "2.13.0+cu126", "cuda": "12.6", "available": True,
                             "devices": [{"name": "NVIDIA A100"}] * 2, "nccl": "2.27.3"}  # fmt: skip


def of(found: list[Finding], name: str) -> Finding:
    (one,) = [finding for finding in found if finding.name == name]
    return one


def test_nvidia_smi_is_read() -> None:
    first = "0, NVIDIA A100-SXM4-80GB, 81920, 517, GPU-aaaa, 550.54.15\n"
    table = f"{first}1, NVIDIA A100-SXM4-80GB, 81920, [N/A], GPU-b, 550.54.15\n"
    gpus, driver = devices.read_gpus(table)
    assert driver == "550.54.15"
    assert gpus[0] == Gpu(0, "NVIDIA A100-SXM4-80GB", 80 * GB, 517 << 20, "GPU-aaaa")
    assert gpus[1].used == 0
    assert devices.read_gpus("No devices were found\n") == ([], "")
    (holder,) = devices.read_holders("4711, GPU-b, 40960\n")
    assert (holder.pid, holder.uuid, holder.used) == (4711, "GPU-b", 40 * GB)


@pytest.mark.parametrize(("banner", "cuda"), [
    ("| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4     |", "12.4"),
    ("| NVIDIA-SMI 590.1   CUDA UMD Version: 13.1 |", "13.1"),
    ("nothing", ""),
])  # fmt: skip
def test_the_drivers_cuda_is_read(banner: str, cuda: str) -> None:
    assert devices.read_cuda(banner) == cuda


NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "0, NVIDIA L4, 23034, 20000, GPU-x, 550.54.15" ;;
--query-compute-apps=*) echo "$HOLDER, GPU-x, 19000" ;;
*) echo "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4 |" ;;
esac
"""


def test_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOLDER", str(os.getpid()))
    driver = devices.ask_driver()
    assert (driver.version, driver.cuda, driver.fault) == ("550.54.15", "12.4", "")
    (held,) = devices.memory_findings(driver)
    assert f"process {os.getpid()} (19.9 GB, " in held.text
    assert held.remedy == f"kill {os.getpid()}"
    assert of(devices.check(driver, CPU_TORCH, {}), "torch").level == "fail"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    assert devices.ask_driver().fault == "Driver/library version mismatch"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nsleep 30\n")
    monkeypatch.setattr(devices, "_SECONDS", 0.3)
    assert devices.ask_driver().fault == "no answer in 0 s"


def test_a_machine_without_gpus_is_no_fault() -> None:
    found = devices.check(Driver(installed=False, hardware=False), CPU_TORCH, {})
    assert worst(found) == "note"
    assert of(found, "torch").text == "no GPU here: everything runs on the CPU"
    assert "gloo" in of(found, "backend").text


def test_good_gpus() -> None:
    found = devices.check(Driver(GPUS[:1], version="550.54", cuda="12.6"), GPU_TORCH, {})
    assert worst(found) == "ok"
    assert of(found, "torch").text == "torch 2.13.0+cu126 with CUDA 12.6 sees 2 GPUs (NVIDIA A100)"
    assert of(found, "backend").text == "NCCL 2.27.3 between GPUs"


def test_a_torch_without_cuda_on_a_machine_with_gpus() -> None:
    fault = of(devices.check(Driver(GPUS, version="550.54", cuda="12.4"), CPU_TORCH, {}, ">=2.13,<2.14"), "torch")
    assert fault.level == "fail"
    assert "built without CUDA" in fault.text
    assert fault.remedy.startswith("pip install --force-reinstall 'torch>=2.13,<2.14'")


def test_a_torch_too_new_for_the_driver() -> None:
    blind = {**GPU_TORCH, "cuda": "13.0", "available": False, "devices": []}
    fault = of(devices.check(Driver(GPUS, version="535.1", cuda="12.2"), blind, {}), "torch")
    assert fault.level == "fail"
    assert "built with CUDA 13.0, and the driver 535.1 runs up to 12.2" in fault.text


def test_gpus_that_a_variable_hides() -> None:
    blind = {**GPU_TORCH, "available": False, "devices": []}
    driver = Driver(GPUS, version="550.54", cuda="12.6")
    fault = of(devices.check(driver, blind, {"CUDA_VISIBLE_DEVICES": "-1"}), "torch")
    assert (fault.level, fault.remedy) == ("fail", "unset CUDA_VISIBLE_DEVICES")
    other = of(devices.check(driver, {**blind, "warnings": ["CUDA initialization: error 802"]}, {}), "torch")
    assert "error 802" in other.text


def test_a_torch_that_cannot_be_imported() -> None:
    found = devices.check(Driver(installed=False, hardware=False), {"broken": "Traceback\nImportError: libfoo.so"}, {})
    assert [finding.name for finding in found] == ["torch"]
    assert found[0].text == "torch cannot be imported: ImportError: libfoo.so"


@pytest.mark.parametrize(("said", "remedy"), [
    ("Failed to initialize NVML: Driver/library version mismatch", "sudo reboot"),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", "dmesg"),
])  # fmt: skip
def test_a_driver_that_does_not_answer(said: str, remedy: str) -> None:
    fault = of(devices.check(Driver(fault=said), CPU_TORCH, {}), "driver")
    assert fault.level == "fail"
    assert remedy in fault.remedy


def test_a_gpu_without_a_driver() -> None:
    fault = of(devices.check(Driver(installed=False, hardware=True), CPU_TORCH, {}), "driver")
    assert fault.level == "fail"
    assert "docker run --gpus all" in fault.remedy


def test_memory_that_a_left_over_process_holds() -> None:
    holder = Holder(
        4711, "GPU-b", 39 * GB, "python train.py", "ann", mine=True, orphan=True, started=time.time() - 7300
    )
    free, held = devices.memory_findings(Driver(GPUS, [holder], "550", "12.4"))
    assert free.level == "ok"
    assert (held.level, held.remedy) == ("warn", "kill 4711")
    assert "process 4711 (41.9 GB, python train.py, of ann, for 2 h, left over" in held.text


def test_memory_of_somebody_else_and_of_nobody_that_is_seen() -> None:
    theirs = Holder(4711, "GPU-b", 39 * GB, "python", "ann")
    assert devices.memory_findings(Driver(GPUS, [theirs]))[1].remedy.startswith("sudo kill 4711  (ask")
    unseen = devices.memory_findings(Driver(GPUS, []))[1]
    assert (unseen.level, "/dev/nvidia1" in unseen.remedy) == ("warn", True)
