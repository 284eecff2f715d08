"""GPUs, their driver, their memory and who holds it; torch's build against them; NCCL or gloo."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from toolkit.doctor.finding import Finding, size_of
from toolkit.doctor.probe import names_in, read_text, run_program

AREA = "devices"
_NVIDIA = "0x10de"
_SECONDS = 10.0  # without persistence mode the driver wakes every GPU for each question
_HELD_BYTES = 1 << 30
_INSTALL_CUDA = "pip install --force-reinstall 'torch{wanted}'  (PyPI's build for Linux is the one with CUDA)"


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver shows it; memory in bytes."""

    index: int
    name: str
    memory: int
    used: int
    uuid: str = ""


@dataclass(frozen=True)
class Holder:
    """A process that has memory of a GPU."""

    pid: int
    uuid: str
    used: int
    command: str
    user: str = ""
    mine: bool = False
    orphan: bool = False
    """Whoever started it has ended."""
    started: float = 0.0
    """Seconds since the epoch; 0 where it cannot be seen."""


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says."""

    gpus: Sequence[Gpu] = ()
    holders: Sequence[Holder] = ()
    version: str = ""
    cuda: str = ""
    """The newest CUDA the driver runs, `12.4`."""
    fault: str = ""
    """Why it says nothing; empty where it answered, or is not installed."""
    installed: bool = True
    hardware: bool = field(default=True)
    """Whether an NVIDIA GPU is in the machine (or in reach of the container), driver or not."""


def ask_driver() -> Driver:
    """Of this machine. It takes about 10 s at most."""
    fields = "index,name,memory.total,memory.used,uuid,driver_version"
    asked = run_program(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], _SECONDS)
    hardware = _nvidia_hardware()
    if asked is None:
        return Driver(installed=False, hardware=hardware)
    if not asked.done:
        said = (asked.out or asked.err).strip().split("\n")[0] or f"exit code {asked.code}"
        return Driver(fault=said, hardware=hardware or "communicate" in said or asked.code is None)
    apps = run_program(
        ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"], _SECONDS
    )
    banner = run_program(["nvidia-smi"], _SECONDS)
    gpus, version = read_gpus(asked.out)
    return Driver(
        gpus,
        [_seen(holder) for holder in read_holders(apps.out if apps else "")],
        version,
        read_cuda(banner.out if banner else ""),
    )


def read_gpus(text: str) -> tuple[list[Gpu], str]:
    """nvidia-smi's table (index, name, total MiB, used MiB, uuid, driver) -> (GPUs, driver's version)."""
    gpus, version = [], ""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 6 and parts[0].isdigit():
            version = parts[5]
            gpus.append(Gpu(int(parts[0]), parts[1], _mebibytes(parts[2]), _mebibytes(parts[3]), parts[4]))
    return gpus, version


def read_holders(text: str) -> list[Holder]:
    """nvidia-smi's table (pid, uuid, used MiB) -> processes."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit():
            found.append(Holder(int(parts[0]), parts[1], _mebibytes(parts[2]), ""))
    return found


def read_cuda(banner: str) -> str:
    """`CUDA Version: 12.4` in nvidia-smi's banner."""
    found = re.search(r"CUDA (?:UMD |Driver )?Version\s*:\s*(\d+\.\d+)", banner)
    return found[1] if found else ""


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0  # "[N/A]" on some


def _seen(holder: Holder) -> Holder:
    """With what the system tells of the process; in a container it may tell nothing."""
    try:
        process = psutil.Process(holder.pid)
        with process.oneshot():
            return Holder(
                holder.pid,
                holder.uuid,
                holder.used,
                " ".join(process.cmdline())[:100] or process.name(),
                process.username(),
                process.uids().real == os.getuid(),
                process.ppid() == 1,
                process.create_time(),
            )
    except psutil.Error:
        return holder


def _nvidia_hardware() -> bool:
    if names_in("/proc/driver/nvidia/gpus"):
        return True
    for device in names_in("/sys/bus/pci/devices"):
        folder = Path("/sys/bus/pci/devices") / device
        if read_text(folder / "vendor") == _NVIDIA and (read_text(folder / "class") or "").startswith("0x03"):
            return True
    return False


def check(driver: Driver, torch: Mapping[str, Any], env: Mapping[str, str], wanted: str = "") -> list[Finding]:
    """`torch`: what `torch_worker` saw; `wanted`: the range of torch this package needs, for the line to type."""
    found = [*driver_findings(driver), *torch_findings(driver, torch, env, wanted)]
    return [*found, *memory_findings(driver), *backend_findings(torch)]


def driver_findings(driver: Driver) -> list[Finding]:
    """Whether the driver answers."""
    if driver.fault:
        remedy = "sudo reboot" if "mismatch" in driver.fault else "`sudo dmesg | grep -iE 'nvrm|xid'` shows why"
        return [Finding(AREA, "driver", "fail", f"nvidia-smi fails: {driver.fault}", remedy)]
    if not driver.installed and driver.hardware:
        remedy = "`sudo ubuntu-drivers install`; in a container, start it with `docker run --gpus all ...`"
        return [Finding(AREA, "driver", "fail", "there is an NVIDIA GPU and no driver for it", remedy)]
    if driver.version:
        text = f"NVIDIA {driver.version}, for CUDA up to {driver.cuda or '?'}"
        return [Finding(AREA, "driver", "ok", text)]
    return []


def torch_findings(driver: Driver, torch: Mapping[str, Any], env: Mapping[str, str], wanted: str = "") -> list[Finding]:
    """Whether torch can be imported, is built for this driver, and sees the GPUs."""
    if torch.get("broken"):
        why = str(torch["broken"]).strip().split("\n")[-1]
        remedy = f"pip install --force-reinstall 'torch{wanted}'"
        return [Finding(AREA, "torch", "fail", f"torch cannot be imported: {why}", remedy)]
    build = torch.get("cuda")
    version = torch.get("version")
    if torch.get("available"):
        kind = f"CUDA {build}" if build else f"ROCm {torch.get('hip')}"
        return [Finding(AREA, "torch", "ok", f"torch {version} with {kind} sees {_count(torch['devices'])}")]
    if not driver.gpus:
        other = torch.get("accelerator", "cpu")
        text = "no GPU here: everything runs on the CPU" if other == "cpu" else f"torch {version} computes on {other}"
        return (
            [] if driver.fault or (driver.hardware and not driver.installed) else [Finding(AREA, "torch", "note", text)]
        )
    if not build:
        text = f"torch {version} is built without CUDA, and this machine has {len(driver.gpus)} NVIDIA GPU(s)"
        return [Finding(AREA, "torch", "fail", text, _INSTALL_CUDA.format(wanted=wanted))]
    return [_unseen(driver, str(version), str(build), torch, env)]


def _unseen(driver: Driver, version: str, build: str, torch: Mapping[str, Any], env: Mapping[str, str]) -> Finding:
    """Torch has CUDA, the driver has GPUs, and torch sees none."""
    if driver.cuda and _major(build) > _major(driver.cuda):
        text = f"torch {version} is built with CUDA {build}, and the driver {driver.version} runs up to {driver.cuda}"
        major = _major(driver.cuda)
        remedy = f"a newer driver (`sudo ubuntu-drivers install`), or a build of torch for CUDA {major} (pytorch.org)"
        return Finding(AREA, "torch", "fail", text, remedy)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        text = f"torch sees no GPU of {len(driver.gpus)}: CUDA_VISIBLE_DEVICES is {visible!r}"
        return Finding(AREA, "torch", "fail", text, "unset CUDA_VISIBLE_DEVICES")
    why = "; ".join(map(str, torch.get("warnings") or ())) or "torch does not say why"
    remedy = 'python -c "import torch; torch.cuda.init()"  (`sudo modprobe nvidia_uvm` mends the commonest case)'
    return Finding(AREA, "torch", "fail", f"torch {version} sees no GPU of {len(driver.gpus)}: {why}", remedy)


def memory_findings(driver: Driver) -> list[Finding]:
    """A line per GPU: whether its memory is free, and who has it otherwise."""
    found = []
    for gpu in driver.gpus:
        name, text = f"gpu {gpu.index}", f"{gpu.name}, {size_of(gpu.used)} of {size_of(gpu.memory)} in use"
        if gpu.used < max(_HELD_BYTES, gpu.memory // 20):
            found.append(Finding(AREA, name, "ok", text))
            continue
        holders = [holder for holder in driver.holders if holder.uuid == gpu.uuid]
        if not holders:
            text += " by processes that cannot be seen from here"
            found.append(Finding(AREA, name, "warn", text, f"`sudo fuser -v /dev/nvidia{gpu.index}` on the host"))
            continue
        who = "; ".join(_of(holder) for holder in holders)
        found.append(Finding(AREA, name, "warn", f"{text} by {who}", _end(holders)))
    return found


def _of(holder: Holder) -> str:
    told = [holder.command] if holder.command else []
    told += [f"of {holder.user}"] if holder.user else []
    told += [f"for {_age(holder.started)}"] if holder.started else []
    told += ["left over: whoever started it has ended"] if holder.orphan else []
    return f"process {holder.pid} ({', '.join([size_of(holder.used), *told])})"


def _end(holders: Sequence[Holder]) -> str:
    pids = " ".join(str(holder.pid) for holder in holders)
    return f"kill {pids}" if all(holder.mine for holder in holders) else f"sudo kill {pids}  (ask its owner first)"


def _age(started: float) -> str:
    seconds = max(0.0, time.time() - started)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def backend_findings(torch: Mapping[str, Any]) -> list[Finding]:
    """What processes would talk over."""
    if torch.get("broken"):
        return []
    if torch.get("nccl"):
        return [Finding(AREA, "backend", "ok", f"NCCL {torch['nccl']} between GPUs")]
    if torch.get("gloo"):
        return [Finding(AREA, "backend", "ok", "gloo between processes (NCCL needs GPUs)")]
    text = "this torch has neither NCCL nor gloo: it cannot run several processes"
    return [Finding(AREA, "backend", "fail", text, "pip install --force-reinstall torch")]


def _count(devices: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({str(device["name"]) for device in devices})
    return f"{len(devices)} GPU{'s' * (len(devices) != 1)} ({', '.join(names)})"


def _major(version: str) -> int:
    return int(version.split(".")[0])
