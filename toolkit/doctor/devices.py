"""GPUs: whether the driver answers, torch sees them, and who holds their memory; NCCL or gloo."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.doctor.finding import Finding, Level, read_text, size_of

_NVIDIA = "0x10de"
_HELD_BYTES = 1 << 30
_SECONDS = 10.0  # without persistence mode the driver wakes every GPU for each question


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver shows it; memory in bytes."""

    index: str
    name: str
    memory: int
    used: int
    uuid: str = ""


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says."""

    gpus: Sequence[Gpu] = ()
    holders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """A GPU's uuid -> the processes that hold memory of it."""
    version: str = ""
    fault: str = ""
    """Why it says nothing; empty where it answered, or is not installed."""
    missing: bool = False
    """There is an NVIDIA GPU, and no nvidia-smi."""


def ask_driver() -> Driver:
    """Asks nvidia-smi."""
    answer = _nvidia_smi("--query-gpu=index,name,memory.total,memory.used,uuid,driver_version")
    if answer is None:
        return Driver(missing=_has_nvidia_hardware())
    if isinstance(answer, str):
        return Driver(fault=answer)
    gpus = [Gpu(row[0], row[1], _bytes(row[2]), _bytes(row[3]), row[4]) for row in answer if len(row) == 6]
    apps = _nvidia_smi("--query-compute-apps=gpu_uuid,pid")
    holders: dict[str, list[str]] = {}
    for row in apps if isinstance(apps, list) else []:
        holders.setdefault(row[0], []).append(row[-1])
    return Driver(gpus, holders, answer[0][-1] if gpus else "")


def _nvidia_smi(query: str) -> list[list[str]] | str | None:
    """Its table; the first line of what it said where it failed, None where it is not installed."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except FileNotFoundError:
        return None
    except (subprocess.TimeoutExpired, OSError) as error:
        return str(error)
    if done.returncode:
        return ((done.stdout or done.stderr).strip() or f"exit code {done.returncode}").splitlines()[0]
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) << 20 if mebibytes.isdigit() else 0  # "[N/A]" on some


def _has_nvidia_hardware() -> bool:
    devices = Path("/sys/bus/pci/devices").glob("*")
    return any(read_text(one / "vendor") == _NVIDIA and read_text(one / "class").startswith("0x03") for one in devices)


def check(driver: Driver, torch: Mapping[str, Any], env: Mapping[str, str], wanted: str = "") -> list[Finding]:
    """`torch`: what `torch_checks.see` found; `wanted`: the range of torch this package needs, for the line to type."""
    install = f"pip install --force-reinstall 'torch{wanted}'"
    found = [*_check_driver(driver), *_check_torch(driver, torch, env, install), *_check_memory(driver)]
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
    if driver.missing:
        remedy = "`sudo ubuntu-drivers install`; in a container, start it with `docker run --gpus all ...`"
        return [Finding("devices", "driver", "fail", "there is an NVIDIA GPU and no driver for it", remedy)]
    return [Finding("devices", "driver", "ok", f"NVIDIA {driver.version}")] if driver.version else []


def _check_torch(driver: Driver, torch: Mapping[str, Any], env: Mapping[str, str], install: str) -> list[Finding]:
    """Checks that torch can be imported, is built for this driver, and sees the GPUs."""
    level: Level = "fail"
    gpus, version, remedy = len(driver.gpus), f"torch {torch.get('version')}", install
    why = "; ".join(map(str, torch.get("warnings") or ())) or "torch does not say why"
    if broken := torch.get("broken"):
        text = f"torch cannot be imported: {str(broken).strip().splitlines()[-1]}"
    elif devices := torch.get("devices"):
        names = ", ".join(sorted({str(device["name"]) for device in devices}))
        kind = f"CUDA {torch['cuda']}" if torch.get("cuda") else "ROCm"
        text = f"{version} with {kind} sees {len(devices)} GPU{'s' * (len(devices) != 1)} ({names})"
        level, remedy = "ok", ""
    elif not gpus:
        other = torch.get("accelerator", "cpu")
        text = "no GPU here: everything runs on the CPU" if other == "cpu" else f"{version} computes on {other}"
        level, remedy = "note", ""
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
    return (
        []
        if level == "note" and (driver.fault or driver.missing)
        else [Finding("devices", "torch", level, text, remedy)]
    )


def _check_memory(driver: Driver) -> list[Finding]:
    """A line per GPU: whether its memory is free, and who has it otherwise."""
    found = []
    for gpu in driver.gpus:
        level: Level = "warn"
        text, remedy = f"{gpu.name}, {size_of(gpu.used)} of {size_of(gpu.memory)} in use", ""
        pids = " ".join(driver.holders.get(gpu.uuid, ()))
        if gpu.used < max(_HELD_BYTES, gpu.memory // 20):
            level = "ok"
        elif pids:
            text += f" by process {pids}"
            remedy = f"`ps -o pid,user,etime,args -p '{pids}'` shows whose; kill {pids}  (if left over)"
        else:
            text += " by processes that cannot be seen from here"
            remedy = f"`sudo fuser -v /dev/nvidia{gpu.index}` on the host"
        found.append(Finding("devices", f"gpu {gpu.index}", level, text, remedy))
    return found
