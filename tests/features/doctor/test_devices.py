"""GPUs as nvidia-smi and torch tell of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.features.doctor.test_compare import of
from toolkit.features.doctor import devices
from toolkit.features.doctor.devices import Driver, Gpu

GB = 1 << 30
GPUS = (Gpu("0", "NVIDIA A100", 80 * GB, 500 << 20), Gpu("1", "NVIDIA A100", 80 * GB, 40 * GB))
DRIVER = Driver(GPUS, version="550.54")
CPU_TORCH: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "accelerator": "cpu", "devices": [], "nccl": None,
                             "gloo": True, "warnings": []}  # fmt: skip
GPU_TORCH: dict[str, Any] = {**CPU_TORCH, "version": "2.13.0+cu126", "cuda": "12.6",
                             "devices": [{"name": "NVIDIA A100"}] * 2, "nccl": "2.27.3"}  # fmt: skip
BLIND = {**GPU_TORCH, "devices": []}


NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*)
    echo "0, NVIDIA L4, 23034, 20000, GPU-x, 550.54.15"
    echo "1, NVIDIA L4, 23034, [N/A], GPU-y, 550.54.15" ;;
--query-compute-apps=*) echo "GPU-x, 4711"; echo "GPU-x, 4712" ;;
esac
"""


def test_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(script: str) -> Driver:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        return devices.ask_driver()

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    driver = smi(NVIDIA_SMI)
    assert driver.version == "550.54.15"
    assert driver.gpus[0] == Gpu("0", "NVIDIA L4", 23034 << 20, 20000 << 20, ("4711", "4712"))
    found = devices.check(driver, GPU_TORCH, {})
    assert "by process 4711 4712" in of(found, "gpu 0").text
    assert "kill 4711 4712" in of(found, "gpu 0").remedy
    assert of(found, "gpu 1").level == "ok"
    fault = "Driver/library version mismatch"
    assert smi(f"#!/bin/sh\necho '{fault}'; exit 18\n").fault == fault
    monkeypatch.setattr(devices, "_SECONDS", 0.3)
    assert "timed out" in smi("#!/bin/sh\nexec sleep 30\n").fault


def test_good_gpus_and_none() -> None:
    found = devices.check(Driver(), CPU_TORCH, {})
    assert [finding.level for finding in found] == ["note", "ok"]
    assert of(found, "torch").text == "no GPU here: everything runs on the CPU"
    assert "gloo" in of(found, "backend").text
    found = devices.check(Driver(GPUS[:1], version="550.54"), GPU_TORCH, {})
    assert {finding.level for finding in found} == {"ok"}
    assert of(found, "torch").text == "torch 2.13.0+cu126 with CUDA 12.6 sees 2 GPUs (NVIDIA A100)"
    assert of(found, "backend").text == "NCCL 2.27.3 between GPUs"
    unseen = of(devices.check(DRIVER, GPU_TORCH, {}), "gpu 1")  # memory of nobody that is seen
    assert (unseen.level, "/dev/nvidia1" in unseen.remedy) == ("warn", True)


@pytest.mark.parametrize(("torch", "env", "text", "remedy"), [
    ({"broken": "ImportError: libfoo.so"}, {}, "cannot be imported: ImportError: libfoo.so", "pip install --force-re"),
    (CPU_TORCH, {}, "built without CUDA", "pip install --force-reinstall 'torch>=2.13,<2.14'"),
    (BLIND, {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES is '-1'", "unset CUDA_VISIBLE_DEVICES"),
    ({**BLIND, "warnings": ["The NVIDIA driver on your system is too old (found version 12020)"]}, {},
     "built with CUDA 12.6, sees no GPU of 2 (driver 550.54): The NVIDIA driver", "a newer driver"),
    ({**BLIND, "warnings": ["CUDA initialization: error 802"]}, {}, "error 802", "sudo modprobe nvidia_uvm"),
])  # fmt: skip
def test_a_torch_that_sees_no_gpu(torch: dict[str, Any], env: dict[str, str], text: str, remedy: str) -> None:
    fault = of(devices.check(DRIVER, torch, env, ">=2.13,<2.14"), "torch")
    assert fault.level == "fail"
    assert text in fault.text
    assert fault.remedy.startswith(remedy)


@pytest.mark.parametrize(("driver", "remedy"), [
    (Driver(fault="Failed to initialize NVML: Driver/library version mismatch"), "sudo reboot"),
    (Driver(fault="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"), "dmesg"),
])  # fmt: skip
def test_a_driver_that_does_not_answer(driver: Driver, remedy: str) -> None:
    found = devices.check(driver, CPU_TORCH, {})
    assert (of(found, "driver").level, remedy in of(found, "driver").remedy) == ("fail", True)
