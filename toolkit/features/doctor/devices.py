"""GPUs: whether the driver answers, torch sees them, and their memory is free; NCCL or gloo."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import plain
from toolkit.features.doctor.finding import Finding
from toolkit.utils.units import size_text

_MUCH_BYTES = 1 << 30
_GPU_COLUMNS = "index,name,memory.total,memory.used,uuid,driver_version"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi shows it; memory in bytes."""

    index: str
    name: str
    memory: int
    used: int
    processes: tuple[str, ...] = ()
    """The ids of those that use its memory."""


@dataclass(frozen=True)
class Devices:
    """What nvidia-smi and torch report of this machine."""

    gpus: Sequence[Gpu] = ()
    driver: str = ""
    driver_fault: str = ""
    """nvidia-smi's error; empty where it answered, or is not installed."""
    torch: str = ""
    cuda: str | None = None
    accelerator: str = "cpu"
    names: Sequence[str] = ()
    """Of the GPUs that torch sees."""
    nccl: str = ""
    gloo: bool = True
    warnings: Sequence[str] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    """torch.utils.collect_env's account, for a report of a fault."""


def look() -> Devices:
    """Raises whatever the import of torch raises."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        import torch
        from torch.utils import collect_env

        available = torch.cuda.is_available()
    gpus, driver, fault = _ask_driver(collect_env)
    distributed = torch.distributed.is_available()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count() if available else 0)]
    has_nccl = names and torch.version.cuda and distributed
    environment: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # it runs a dozen programs that may be missing or broken
        environment = collect_env.get_env_info()._asdict()
    return Devices(
        gpus, driver, fault, str(torch.__version__), torch.version.cuda,
        str(torch.accelerator.current_accelerator() or "cpu"), names,
        ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
        distributed and torch.distributed.is_gloo_available(),
        [str(record.message)[:500] for record in records if "CUDA" in str(record.message)], environment,
    )  # fmt: skip


def _ask_driver(collect_env: Any) -> tuple[list[Gpu], str, str]:
    """(GPUs, the driver's version, nvidia-smi's error)."""
    queries = f"--query-gpu={_GPU_COLUMNS}", "--query-compute-apps=gpu_uuid,pid"
    tables = []
    for query in queries:
        try:
            status, out, err = collect_env.run([collect_env.get_nvidia_smi(), query, "--format=csv,noheader,nounits"])
        except FileNotFoundError:
            return [], "", ""
        if status:
            return [], "", plain((out or err or f"exit status {status}").strip().splitlines()[0])
        tables.append([[cell.strip() for cell in line.split(",")] for line in out.splitlines()])
    rows, apps = tables
    gpus = [
        Gpu(row[0], row[1], _bytes(row[2]), _bytes(row[3]), tuple(app[-1] for app in apps if app[0] == row[4]))
        for row in rows
        if len(row) == len(_GPU_COLUMNS.split(","))
    ]
    return gpus, rows[0][-1] if gpus else "", ""


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) << 20 if mebibytes.isdigit() else 0  # "[N/A]" on some


def check(devices: Devices, env: Mapping[str, str], install: str) -> list[Finding]:
    """`install`: the line that installs the torch which this package needs."""
    findings = [*_check_driver(devices), _check_torch(devices, env, install), *map(_check_memory, devices.gpus)]
    if devices.nccl:
        return [*findings, Finding("devices", "backend", "ok", f"NCCL {devices.nccl} between GPUs")]
    if devices.gloo:
        return [*findings, Finding("devices", "backend", "ok", "gloo between processes (NCCL needs GPUs)")]
    text = "this torch has neither NCCL nor gloo: it cannot run several processes"
    return [*findings, Finding("devices", "backend", "fail", text, install)]


def _check_driver(devices: Devices) -> list[Finding]:
    if fault := devices.driver_fault:
        remedy = "sudo reboot" if "mismatch" in fault else "`sudo dmesg | grep -iE 'nvrm|xid'` shows why"
        return [Finding("devices", "driver", "fail", f"nvidia-smi fails: {fault}", remedy)]
    return [Finding("devices", "driver", "ok", f"NVIDIA {devices.driver}")] if devices.driver else []


def _check_torch(devices: Devices, env: Mapping[str, str], install: str) -> Finding:
    """Whether torch is built for this driver, and sees the GPUs."""
    count, version, remedy = len(devices.gpus), f"torch {devices.torch}", install
    why = plain("; ".join(devices.warnings)) or "torch does not say why"
    if devices.names:
        kind, names = f"CUDA {devices.cuda}" if devices.cuda else "ROCm", ", ".join(sorted(set(devices.names)))
        text = f"{version} with {kind} sees {len(devices.names)} GPU{'s' * (len(devices.names) > 1)} ({names})"
        return Finding("devices", "torch", "ok", text)
    if not count:
        text = "no GPU here: everything runs on the CPU"
        text = text if devices.accelerator == "cpu" else f"{version} computes on {devices.accelerator}"
        return Finding("devices", "torch", "note", text)
    if not devices.cuda:
        text = f"{version} is built without CUDA, and this machine has {count} NVIDIA GPU(s)"
        remedy += "  (PyPI's build for Linux is the one with CUDA)"
    elif "CUDA_VISIBLE_DEVICES" in env:
        text = f"torch sees no GPU of {count}: CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}"
        remedy = "unset CUDA_VISIBLE_DEVICES"
    else:
        text = f"{version}, built with CUDA {devices.cuda}, sees no GPU of {count} (driver {devices.driver}): {why}"
        remedy = "sudo modprobe nvidia_uvm"
        if "too old" in why:
            remedy = "a newer driver (`sudo ubuntu-drivers install`), or a build of torch for its CUDA (pytorch.org)"
    return Finding("devices", "torch", "fail", text, remedy)


def _check_memory(gpu: Gpu) -> Finding:
    name, text = f"gpu {gpu.index}", f"{gpu.name}, {size_text(gpu.used)} of {size_text(gpu.memory)} in use"
    if gpu.used < max(_MUCH_BYTES, gpu.memory // 20):
        return Finding("devices", name, "ok", text)
    if not gpu.processes:
        text += " by processes that cannot be seen from here"
        return Finding("devices", name, "warn", text, f"`sudo fuser -v /dev/nvidia{gpu.index}` on the host")
    pids = " ".join(gpu.processes)
    remedy = f"`ps -o pid,user,etime,args -p '{pids}'` shows whose; kill {pids}  (if left over)"
    return Finding("devices", name, "warn", f"{text} by process {pids}", remedy)
