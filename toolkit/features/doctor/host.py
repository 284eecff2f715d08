"""Checks of a machine: versions, disk space, locks of killed builds, environment variables, network."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from toolkit.errors import UserError, printable, size_text
from toolkit.features.doctor.finding import Finding
from toolkit.launch import network
from toolkit.launch.machines import Machines
from toolkit.launch.options import clean_environment
from toolkit.utils.versions import ALL_PACKAGES, check_requirements, requirements, versions

_LITTLE_DISK, _NO_DISK, _SMALL_SHM = 10e9, 1e9, 1e9
# launcher variables that belong to a job, or do no harm
_IGNORED_VARIABLES = (
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_",
    "MV2_",
    "TORCH_NCCL_",
    "ACCELERATE_LOG_LEVEL",
)
_NETWORK_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "CUDA_VISIBLE_DEVICES")


def install_command(name: str) -> str:
    """The command that reinstalls a library in the version that this package needs."""
    needed = next(f"{line.name}{line.specifier}" for line in requirements() if line.name == name)
    return f"pip install --force-reinstall '{needed}'"


def check_versions() -> Iterator[Finding]:
    python = f"Python {platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok", python)
    installed = [f"{name} {version}" for name, version in versions(ALL_PACKAGES).items() if version]
    yield Finding("libraries", "ok", ", ".join(installed))
    try:
        newer = check_requirements()
    except UserError as error:
        yield Finding("requirements", "fail", str(error))
    else:
        if newer:
            yield Finding("requirements", "note", f"newer than tested: {', '.join(newer)}")


def check_disk(output: Path) -> Iterator[Finding]:
    """Free space in the output folder, and in /dev/shm, which NCCL and data loader workers need."""
    # a run creates the missing folders below it
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if path.is_dir())
    free, quoted = psutil.disk_usage(str(folder)).free, shlex.quote(str(folder))
    text = f"{size_text(free)} free in {folder} (the run's output)"
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"`sudo chown $USER {quoted}`, or another --output_dir"
        yield Finding("disk", "fail", f"{folder} cannot be written by this user", remedy)
    elif free < _LITTLE_DISK:
        remedy = f"`du -xh {quoted} | sort -h | tail` lists the largest folders"
        text += ": a checkpoint takes 12 bytes or more per parameter"
        yield Finding("disk", "fail" if free < _NO_DISK else "warn", text, remedy)
    else:
        yield Finding("disk", "ok", text)
    shm = Path("/dev/shm")
    if shm.is_dir() and (size := psutil.disk_usage(str(shm)).total) < _SMALL_SHM:
        text = f"{shm} has only {size_text(size)}: NCCL and data loaders may fail with a bus error"
        yield Finding(
            "shared memory", "warn", text, "`docker run --shm-size=8g ...` (or --ipc=host)"
        )


def check_builds(env: Mapping[str, str]) -> Iterator[Finding]:
    """Locks of killed builds of extensions: torch's FileBaton creates a file `lock`, which a killed build leaves."""
    folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    folder = Path(env.get("TORCH_EXTENSIONS_DIR") or folder)
    locks = [path.resolve() for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock"))]
    processes = psutil.process_iter(["open_files"]) if locks else ()  # those of this user
    open_files = {file.path for process in processes for file in process.info["open_files"] or ()}
    if not locks:
        yield Finding("cache", "ok", f"{folder}: no stale lock")
    for lock in locks:
        name, minutes = lock.parent.name, (time.time() - lock.stat().st_mtime) / 60
        if str(lock) in open_files:
            yield Finding(name, "note", f"{name} is being built (for {minutes:.0f} min now)")
            continue
        text = f"a killed build of {name} left a lock {minutes:.0f} min ago (or another machine that shares this "
        text += f"folder is building it): every run that needs {name} waits forever"
        yield Finding(name, "fail", text, f"rm {shlex.quote(str(lock))}")


def check_shell(env: Mapping[str, str]) -> Iterator[Finding]:
    """Environment variables that silently change how a run starts."""
    names = sorted(
        name
        for name in set(env) - set(clean_environment(env))
        if not name.startswith(_IGNORED_VARIABLES)
    )
    if names:
        text = f"this shell has a launcher's variables: {', '.join(f'{name}={env[name]}' for name in names)}"
        yield Finding("launcher", "warn", printable(text), f"unset {shlex.join(names)}")
    if variables := [
        f"{name}={env[name]}" for name in sorted(env) if name.startswith(_NETWORK_VARIABLES)
    ]:
        yield Finding("variables", "note", printable(", ".join(variables)))


def check_interfaces(machines: Machines) -> Iterator[Finding]:
    """Lists the interfaces, and the one that traffic between machines will use."""
    interfaces, states = network.local_addresses(), psutil.net_if_stats()
    texts = []
    for address, name in interfaces.items():
        if name in states and not network.is_loopback(address):
            state = "" if states[name].isup else "down, "
            texts.append(f"{name} {address} ({state}MTU {states[name].mtu})")
    yield Finding(
        "interfaces", "ok", ", ".join(texts) or "this machine has only its loopback interface"
    )
    if machines.count == 1:
        return
    target = machines.first
    address = network.source_address_for(target) or ""
    if address in interfaces:
        yield Finding(
            "chosen", "ok", f"{interfaces[address]} ({address}), by the route to {target}"
        )
    else:
        remedy = f"`ip route get {shlex.quote(target)}`, `ip -br link`"
        yield Finding("chosen", "fail", f"no interface leads to {target}", remedy)
    yield Finding(
        "this one", "ok", f"machine {machines.rank} of {machines.count} ({machines.rank_source})"
    )
