"""Checks of one machine: driver, torch, GPUs, shared memory, disk."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from toolkit.errors import first_line, size_text

_FULL_DISK, _LITTLE_DISK, _SMALL_SHARED_MEMORY, _MEMORY_IN_USE = 1e9, 10e9, 1e9, 1e9
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class Finding:
    """One line of the report; after a FAIL a run cannot work."""

    name: str
    level: Literal["ok", "note", "warn", "FAIL"]
    text: str
    remedy: str = ""
    """The command to type, or what to look at."""


def check_gpus() -> Iterator[Finding]:
    """The driver answers, torch can be imported and was built for it, and each GPU computes."""
    num_gpus = 0
    if shutil.which(_NVIDIA_SMI[0]):
        smi = subprocess.run(
            _NVIDIA_SMI,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        lines = (smi.stdout or smi.stderr).strip().splitlines()
        if smi.returncode:
            remedy = "`sudo dmesg | grep -iE 'nvrm|xid'` shows why; sudo reboot"
            yield Finding("driver", "FAIL", f"nvidia-smi fails: {' '.join(lines)}", remedy)
        else:
            num_gpus = len(lines)
            yield Finding("driver", "ok", f"NVIDIA {lines[0]}")
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        try:
            import torch
        except (ImportError, OSError) as error:
            text = f"torch cannot be imported: {type(error).__name__}: {first_line(error)}"
            yield Finding("torch", "FAIL", text, "pip install --force-reinstall torch")
            return
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    version = f"torch {torch.__version__}, built with CUDA {torch.version.cuda}"
    reasons = "; ".join(str(record.message) for record in records)
    if visible:
        yield Finding("torch", "ok", f"{version}, sees {visible} GPUs")
    elif not num_gpus:
        device = torch.accelerator.current_accelerator() or "CPUs"
        yield Finding(
            "torch", "note", f"torch {torch.__version__}, no NVIDIA GPU: uses {device}"
        )
    else:
        text = f"{version}, sees no GPU of {num_gpus}: {reasons}"
        yield Finding(
            "torch", "FAIL", text, _remedy_for_no_gpu(torch.version.cuda, reasons)
        )
    for index in range(visible):
        yield _check_gpu(index)


def _remedy_for_no_gpu(cuda: str | None, reasons: str) -> str:
    if not cuda:
        return "pip install --force-reinstall torch  (the build for Linux on PyPI has CUDA)"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return "unset CUDA_VISIBLE_DEVICES"
    if "too old" in reasons:
        return "a newer driver, or a build of torch for an older CUDA (pytorch.org)"
    return "sudo modprobe nvidia_uvm"


def _check_gpu(index: int) -> Finding:
    """Whether the GPU computes, and has its memory free."""
    import torch

    name = torch.cuda.get_device_name(index)
    try:
        torch.ones(1, device=f"cuda:{index}").add(1).item()
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        remedy = "nvidia-smi"
        if "no kernel image" in str(error):
            remedy = (
                "a build of the same torch for an older CUDA (12.6 has V100; pytorch.org)"
            )
        return Finding(f"gpu {index}", "FAIL", f"{name}: {first_line(error)}", remedy)
    used = total - free
    text = f"{name}, {size_text(used)} of {size_text(total)} in use"
    if used <= max(_MEMORY_IN_USE, total / 20):
        return Finding(f"gpu {index}", "ok", text)
    remedy = f"`nvidia-smi` or `sudo fuser -v /dev/nvidia{index}` names the process"
    return Finding(f"gpu {index}", "warn", text, remedy)


def check_shared_memory() -> Iterator[Finding]:
    """Size of /dev/shm, which NCCL and data loader workers use."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    size = psutil.disk_usage(str(folder)).total
    text = f"{size_text(size)} in {folder}"
    if size >= _SMALL_SHARED_MEMORY:
        yield Finding("shared memory", "ok", text)
        return
    text += ": NCCL and data loaders may fail with a bus error"
    yield Finding(
        "shared memory", "warn", text, "`docker run --shm-size=8g ...` (or --ipc=host)"
    )


def check_disk(output: Path) -> Finding:
    """Free space, and permissions, where a run would create its folder."""
    folder = output.absolute()
    while not folder.is_dir():
        folder = folder.parent
    quoted = shlex.quote(str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"`sudo chown $USER {quoted}`, or another --output_dir"
        return Finding("disk", "FAIL", f"{folder} cannot be written by this user", remedy)
    free = psutil.disk_usage(str(folder)).free
    text = f"{size_text(free)} free in {folder} (the run's output)"
    if free >= _LITTLE_DISK:
        return Finding("disk", "ok", text)
    text += ": a checkpoint takes 12 bytes or more per parameter"
    remedy = f"`du -xh {quoted} | sort -h | tail` lists the largest folders"
    return Finding("disk", "FAIL" if free < _FULL_DISK else "warn", text, remedy)
