"""GPUs: whether the driver answers, torch sees them, and their memory is free; NCCL or gloo."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import plain
from toolkit.features.doctor.finding import Finding
from toolkit.utils.units import size_text

_HELD_BYTES = 1 << 30
_SECONDS = 10.0  # without persistence mode the driver wakes every GPU for each question


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver shows it; memory in bytes."""

    index: str
    name: str
    memory: int
    used: int
    holders: tuple[str, ...] = ()
    """The processes that hold memory of it."""


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says."""

    gpus: Sequence[Gpu] = ()
    version: str = ""
    fault: str = ""
    """Why it says nothing; empty where it answered, or is not installed."""


def ask_driver() -> Driver:
    """Asks nvidia-smi."""
    try:
        rows = _nvidia_smi("--query-gpu=index,name,memory.total,memory.used,uuid,driver_version")
        held = _nvidia_smi("--query-compute-apps=gpu_uuid,pid")
    except FileNotFoundError:
        return Driver()
    except (subprocess.SubprocessError, OSError) as error:
        said = str(getattr(error, "stdout", "") or getattr(error, "stderr", "") or error)
        return Driver(fault=plain(said.strip().splitlines()[0]))
    gpus = [
        Gpu(row[0], row[1], _bytes(row[2]), _bytes(row[3]), tuple(app[-1] for app in held if app[0] == row[4]))
        for row in rows
        if len(row) == 6
    ]
    return Driver(gpus, rows[0][-1] if gpus else "")


def _nvidia_smi(query: str) -> list[list[str]]:
    """Its table. Raises OSError and SubprocessError."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_SECONDS, check=True, **how)
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) << 20 if mebibytes.isdigit() else 0  # "[N/A]" on some


def check(driver: Driver, torch: Mapping[str, Any], env: Mapping[str, str], wanted: str = "") -> list[Finding]:
    """`torch`: what `torch_checks.see` found; `wanted`: the range of torch this package needs, for the line to type."""
    install = f"pip install --force-reinstall 'torch{wanted}'"
    found = [*_check_driver(driver), _check_torch(driver, torch, env, install), *map(_check_memory, driver.gpus)]
    if torch.get("broken"):
        return found
    if torch.get("nccl"):
        return [*found, Finding("devices", "backend", "ok", f"NCCL {torch['nccl']} between GPUs")]
    if torch.get("gloo"):
        return [*found, Finding("devices", "backend", "ok", "gloo between processes (NCCL needs GPUs)")]
    text = "this torch has neither NCCL nor gloo: it cannot run several processes"
    return [*found, Finding("devices", "backend", "fail", text, install)]


def _check_driver(driver: Driver) -> list[Finding]:
    if driver.fault:
        remedy = "sudo reboot" if "mismatch" in driver.fault else "`sudo dmesg | grep -iE 'nvrm|xid'` shows why"
        return [Finding("devices", "driver", "fail", f"nvidia-smi fails: {driver.fault}", remedy)]
    return [Finding("devices", "driver", "ok", f"NVIDIA {driver.version}")] if driver.version else []


def _check_torch(driver: Driver, torch: Mapping[str, Any], env: Mapping[str, str], install: str) -> Finding:
    """Checks that torch can be imported, is built for this driver, and sees the GPUs."""
    gpus, version, remedy = len(driver.gpus), f"torch {torch.get('version')}", install
    why = plain("; ".join(map(str, torch.get("warnings") or ()))) or "torch does not say why"
    if broken := torch.get("broken"):
        text = f"torch cannot be imported: {plain(str(broken).strip().splitlines()[-1])}"
    elif devices := torch.get("devices"):
        names = ", ".join(sorted({str(device["name"]) for device in devices}))
        kind = f"CUDA {torch['cuda']}" if torch.get("cuda") else "ROCm"
        text = f"{version} with {kind} sees {len(devices)} GPU{'s' * (len(devices) != 1)} ({names})"
        return Finding("devices", "torch", "ok", text)
    elif not gpus:
        other = torch.get("accelerator", "cpu")
        text = "no GPU here: everything runs on the CPU" if other == "cpu" else f"{version} computes on {other}"
        return Finding("devices", "torch", "note", text)
    elif not torch.get("cuda"):
        text = f"{version} is built without CUDA, and this machine has {gpus} NVIDIA GPU(s)"
        remedy += "  (PyPI's build for Linux is the one with CUDA)"
    elif "CUDA_VISIBLE_DEVICES" in env:
        text = f"torch sees no GPU of {gpus}: CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}"
        remedy = "unset CUDA_VISIBLE_DEVICES"
    else:
        text = f"{version}, built with CUDA {torch['cuda']}, sees no GPU of {gpus} (driver {driver.version}): {why}"
        remedy = "sudo modprobe nvidia_uvm"
        if "too old" in why:
            remedy = "a newer driver (`sudo ubuntu-drivers install`), or a build of torch for its CUDA (pytorch.org)"
    return Finding("devices", "torch", "fail", text, remedy)


def _check_memory(gpu: Gpu) -> Finding:
    name, text = f"gpu {gpu.index}", f"{gpu.name}, {size_text(gpu.used)} of {size_text(gpu.memory)} in use"
    if gpu.used < max(_HELD_BYTES, gpu.memory // 20):
        return Finding("devices", name, "ok", text)
    if not gpu.holders:
        text += " by processes that cannot be seen from here"
        return Finding("devices", name, "warn", text, f"`sudo fuser -v /dev/nvidia{gpu.index}` on the host")
    pids = " ".join(gpu.holders)
    remedy = f"`ps -o pid,user,etime,args -p '{pids}'` shows whose; kill {pids}  (if left over)"
    return Finding("devices", name, "warn", f"{text} by process {pids}", remedy)
