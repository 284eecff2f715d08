"""Checks of GPUs from the output of nvidia-smi and torch."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from toolkit.features.doctor import devices
from toolkit.features.doctor.devices import Devices
from toolkit.features.doctor.finding import Finding

GPUS = (
    ("0", "NVIDIA A100", "81920", "500", "550.54"),
    ("1", "NVIDIA A100", "81920", "40960", "550.54"),
)
CPU_BUILD = Devices(torch="2.13.0+cpu")
GPU_BUILD = Devices(
    GPUS[:1], torch="2.13.0+cu126", cuda="12.6", names=["NVIDIA A100"] * 2, nccl="2.27.3"
)
BLIND = replace(GPU_BUILD, gpus=GPUS, names=[], nccl="")
INSTALL = "pip install --force-reinstall 'torch"


def findings(hardware: Devices, env: dict[str, str] | None = None) -> dict[str, Finding]:
    return {finding.name: finding for finding in devices.check(hardware, env or {})}


def test_the_output_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(script: str) -> Devices:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        return devices.query_devices()

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    hardware = smi(
        "echo '0, NVIDIA L4, 23034, 20000, 550.54.15'; echo '1, NVIDIA L4, 23034, [N/A], 550.54.15'"
    )
    by_name = findings(hardware)
    assert by_name["driver"].text == "NVIDIA 550.54.15"
    assert (by_name["gpu 0"].level, by_name["gpu 1"].level) == ("warn", "ok")
    assert "/dev/nvidia0" in by_name["gpu 0"].remedy
    assert hardware.environment["torch_version"] == hardware.torch
    assert smi("echo 'No devices were found'").gpus == []
    fault = "Driver/library version mismatch"
    assert smi(f"echo '{fault}'; exit 18").driver_fault == fault


def test_good_gpus_and_none() -> None:
    none = findings(CPU_BUILD)
    assert [finding.level for finding in none.values()] == ["note", "ok"]
    assert "gloo" in none["backend"].text
    good = findings(GPU_BUILD)
    assert {finding.level for finding in good.values()} == {"ok"}
    assert good["torch"].text == "torch 2.13.0+cu126 with CUDA 12.6 sees 2 GPUs (NVIDIA A100)"
    assert good["backend"].text == "NCCL 2.27.3 between GPUs"
    assert findings(replace(CPU_BUILD, gloo=False))["backend"].level == "fail"


@pytest.mark.parametrize(("hardware", "env", "text", "remedy"), [
    (replace(CPU_BUILD, driver_fault="Failed to initialize NVML: Driver/library version mismatch"), {}, "NVML",
     "sudo reboot"),
    (replace(CPU_BUILD, driver_fault="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"),
     {}, "couldn't communicate", "dmesg"),
    (replace(CPU_BUILD, gpus=GPUS), {}, "built without CUDA", INSTALL),
    (BLIND, {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES is '-1'", "unset CUDA_VISIBLE_DEVICES"),
    (replace(BLIND, warnings=["The NVIDIA driver on your system is too old (found version 12020)"]), {},
     "built with CUDA 12.6, sees no GPU of 2 (driver 550.54): The NVIDIA driver", "a newer driver"),
    (replace(GPU_BUILD, faults=["no kernels for Tesla V100"]), {}, "Tesla V100", "CUDA 12.6"),
    (replace(BLIND, warnings=["CUDA initialization: error 802"]), {}, "error 802", "sudo modprobe nvidia_uvm"),
])  # fmt: skip
def test_failures_of_torch_and_the_driver(
    hardware: Devices, env: dict[str, str], text: str, remedy: str
) -> None:
    fault = findings(hardware, env)["driver" if hardware.driver_fault else "torch"]
    assert (fault.level, text in fault.text, remedy in fault.remedy) == ("fail", True, True)


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "built", "works"),
    [((7, 0), CUDA_13, False), ((7, 5), CUDA_13, True), ((8, 9), CUDA_13, True), ((9, 0), CUDA_13, True),
     ((11, 0), CUDA_13, False), ((12, 1), CUDA_13, True), ((7, 0), ["sm_50", "sm_60", "sm_70"], True),
     ((6, 1), ["sm_50", "sm_60", "sm_70"], True), ((9, 0), ["gfx90a"], True)],
)  # fmt: skip
def test_gpus_for_which_torch_was_not_built(
    capability: tuple[int, int], built: list[str], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    fault = devices.missing_kernels(0)
    assert (fault == "") is works
    assert works or "Tesla V100" in fault
