"""Checks of GPUs: the driver, torch's view of them, their free memory; and of NCCL and gloo."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import first_line, printable, size_text
from toolkit.features.doctor.finding import Finding
from toolkit.features.doctor.host import install_command

_MAX_BYTES_IN_USE = 1 << 30
_QUERY = (
    "--query-gpu=index,name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True)
class Devices:
    """The GPUs of this machine, by nvidia-smi and by torch."""

    gpus: Sequence[Sequence[str]] = ()
    """Rows of nvidia-smi: index, name, MiB of memory, MiB in use, driver version."""
    driver_fault: str = ""
    """The error of nvidia-smi; "" if it works or is not installed."""
    import_error: str = ""
    """Why torch cannot be imported."""
    torch: str = ""
    cuda: str | None = None
    accelerator: str = "cpu"
    names: Sequence[str] = ()
    """The GPUs that torch sees."""
    faults: Sequence[str] = ()
    """Errors for devices that this build of torch has no kernels for."""
    nccl: str = ""
    gloo: bool = True
    warnings: Sequence[str] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The output of torch.utils.collect_env, for a bug report."""


def query_devices() -> Devices:
    """What torch and nvidia-smi say. A torch that cannot be imported is a fault, too."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        try:
            import torch
            from torch.utils import collect_env
        except (ImportError, OSError) as error:
            return Devices(import_error=f"{type(error).__name__}: {printable(first_line(error))}")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        status, out, err = collect_env.run([collect_env.get_nvidia_smi(), *_QUERY])
    except FileNotFoundError:
        status, out, err = 0, "", ""
    rows = (
        [] if status else [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    )
    distributed = torch.distributed.is_available()
    faults = [missing_kernels(index) for index in range(count)]
    return Devices(
        gpus=[row for row in rows if len(row) == 5],  # not its messages
        driver_fault=printable((out or err or f"exit status {status}").splitlines()[0])
        if status
        else "",
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        accelerator=str(torch.accelerator.current_accelerator() or "cpu"),
        names=[torch.cuda.get_device_name(index) for index in range(count)],
        faults=[fault for fault in faults if fault],
        nccl=".".join(map(str, torch.cuda.nccl.version()))
        if count and torch.version.cuda and distributed
        else "",
        gloo=distributed and torch.distributed.is_gloo_available(),
        warnings=[str(record.message)[:500] for record in records if "CUDA" in str(record.message)],
        environment=collect_env.get_env_info()._asdict(),
    )


def check(devices: Devices, env: Mapping[str, str]) -> Iterator[Finding]:
    install = install_command("torch")
    if devices.import_error:
        yield Finding("torch", "fail", f"torch cannot be imported: {devices.import_error}", install)
        return
    if fault := devices.driver_fault:
        remedy = (
            "sudo reboot" if "mismatch" in fault else "`sudo dmesg | grep -iE 'nvrm|xid'` shows why"
        )
        yield Finding("driver", "fail", f"nvidia-smi fails: {fault}", remedy)
    elif devices.gpus:
        yield Finding("driver", "ok", f"NVIDIA {devices.gpus[0][-1]}")
    yield _check_torch(devices, env, install)
    for index, name, memory, used, _ in devices.gpus:
        total, in_use = (
            int(size) << 20 if size.isdigit() else 0 for size in (memory, used)
        )  # "[N/A]" on some
        text = f"{name}, {size_text(in_use)} of {size_text(total)} in use"
        busy = in_use > max(_MAX_BYTES_IN_USE, total // 20)
        remedy = f"find the process by `nvidia-smi` or `sudo fuser -v /dev/nvidia{index}`, and kill it if it is stale"
        yield Finding(f"gpu {index}", "warn" if busy else "ok", text, remedy if busy else "")
    if devices.nccl:
        yield Finding("backend", "ok", f"NCCL {devices.nccl} between GPUs")
    elif devices.gloo:
        yield Finding("backend", "ok", "gloo between processes (NCCL needs GPUs)")
    else:
        yield Finding(
            "backend",
            "fail",
            "this torch has no NCCL and no gloo: it cannot run several processes",
            install,
        )


def _check_torch(devices: Devices, env: Mapping[str, str], install: str) -> Finding:
    """Whether torch is built for this driver, and sees the GPUs."""
    count, version, remedy = len(devices.gpus), f"torch {devices.torch}", install
    why = printable("; ".join(devices.warnings)) or "torch does not say why"
    if devices.faults:
        return Finding(
            "torch", "fail", devices.faults[0], "a build of torch for CUDA 12.6 (pytorch.org)"
        )
    if devices.names:
        kind, names = (
            f"CUDA {devices.cuda}" if devices.cuda else "ROCm",
            ", ".join(sorted(set(devices.names))),
        )
        text = f"{version} with {kind} sees {len(devices.names)} GPU{'s' * (len(devices.names) > 1)} ({names})"
        return Finding("torch", "ok", text)
    if not count:
        return Finding(
            "torch", "note", f"{version} computes on {devices.accelerator}: no NVIDIA GPU here"
        )
    if not devices.cuda:
        text = f"{version} is built without CUDA, and this machine has {count} NVIDIA GPU(s)"
        remedy += "  (the build for Linux on PyPI has CUDA)"
    elif "CUDA_VISIBLE_DEVICES" in env:
        text = (
            f"torch sees no GPU of {count}: CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}"
        )
        remedy = "unset CUDA_VISIBLE_DEVICES"
    else:
        driver = devices.gpus[0][-1]
        text = f"{version}, built with CUDA {devices.cuda}, sees no GPU of {count} (driver {driver}): {why}"
        remedy = "sudo modprobe nvidia_uvm"
        if "too old" in why:
            remedy = "a newer driver (`sudo ubuntu-drivers install`), or a build of torch for its CUDA (pytorch.org)"
    return Finding("torch", "fail", text, remedy)


def missing_kernels(device: int) -> str:
    """That this build of torch has no kernels for a GPU (V100 with CUDA 13); empty if it has."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    for architecture in built:
        if _runs(architecture, (major, minor)):
            return ""
    name = torch.cuda.get_device_name(device)
    return (
        f"torch {torch.__version__} has no kernels for {name} (sm_{major}{minor}; it has "
        f"{', '.join(built)}): install a build of the same version for an older CUDA "
        "(12.6 has V100; pytorch.org)"
    )


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU runs code for `sm_80`, `sm_90a`, `compute_120` or AMD's `gfx90a`."""
    kind, _, number = architecture.partition("_")
    if not number[:1].isdigit():
        return True  # AMD's
    code = divmod(int(number.rstrip("af")), 10)
    same_generation = kind != "sm" or code[0] == capability[0]
    return code <= capability and same_generation
