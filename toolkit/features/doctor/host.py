"""What a run needs of a machine beside devices: room on disk, no stale lock of a build, a clean shell."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from toolkit.errors import plain
from toolkit.features.doctor.finding import Finding
from toolkit.launch.relaunch import clean_environment
from toolkit.utils.units import size_text

_LITTLE_DISK, _NO_DISK, _SMALL_SHM = 10e9, 1e9, 1e9
# a job's own, or harmless
_MAY_STAY = ("SLURM_", "OMPI_", "PMI", "MPI_", "MV2_", "TORCH_NCCL_", "ACCELERATE_LOG_LEVEL")


def check(output: Path) -> list[Finding]:
    """Looks for room where a run writes, and in /dev/shm, which NCCL and data loaders' workers need."""
    # the nearest folder above that exists: the others are made when they are needed
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if path.is_dir())
    free, quoted = psutil.disk_usage(str(folder)).free, shlex.quote(str(folder))
    disk = Finding("host", "disk", "ok", f"{size_text(free)} free in {folder} (the run's output)")
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"`sudo chown $USER {quoted}`, or another --output_dir"
        disk = Finding("host", "disk", "fail", f"{folder} cannot be written by this user", remedy)
    elif free < _LITTLE_DISK:
        text = f"{disk.text}: a checkpoint takes 12 bytes or more per parameter"
        remedy = f"`du -xh {quoted} | sort -h | tail` shows what takes the room"
        disk = Finding("host", "disk", "fail" if free < _NO_DISK else "warn", text, remedy)
    shm = Path("/dev/shm")
    if shm.is_dir() and (size := psutil.disk_usage(str(shm)).total) < _SMALL_SHM:
        text = f"{shm} has {size_text(size)}: NCCL and data loaders fail in so little, with a bus error"
        return [disk, Finding("host", "shared memory", "warn", text, "`docker run --shm-size=8g ...` (or --ipc=host)")]
    return [disk]


def check_builds(env: Mapping[str, str]) -> list[Finding]:
    """Torch's FileBaton makes a file `lock` while it builds; a killed build leaves it behind."""
    folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    folder = Path(env.get("TORCH_EXTENSIONS_DIR") or folder)
    locks = [path.resolve() for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock"))]
    held = _open_files() if locks else set()
    found = []
    for lock in locks:
        name, minutes = lock.parent.name, (time.time() - lock.stat().st_mtime) / 60
        if str(lock) in held:
            found.append(Finding("builds", name, "note", f"{name} is being built (for {minutes:.0f} min now)"))
            continue
        text = f"a build of {name} that was killed left a lock {minutes:.0f} min ago (or another machine that shares "
        text += f"this folder is building it): every run that needs {name} waits forever"
        found.append(Finding("builds", name, "fail", text, f"rm {shlex.quote(str(lock))}"))
    return found or [Finding("builds", "cache", "ok", f"{folder}: no lock is left")]


def _open_files() -> set[str]:
    """Of all processes; of other users' nothing can be seen."""
    found: set[str] = set()
    for process in psutil.process_iter():
        try:
            found.update(opened.path for opened in process.open_files())
        except (psutil.Error, OSError):
            continue
    return found


def check_shell(env: Mapping[str, str]) -> list[Finding]:
    """Variables that change what is started, silently."""
    found = []
    left = set(env) - set(clean_environment(env))
    if names := sorted(name for name in left if not name.startswith(_MAY_STAY)):
        text = f"this shell holds a launcher's variables: {', '.join(f'{name}={env[name]}' for name in names)}"
        found.append(Finding("shell", "launcher", "warn", plain(text), f"unset {shlex.join(names)}"))
    if told := ", ".join(f"{name}={value}" for name, value in variables(env).items()):
        found.append(Finding("shell", "variables", "note", plain(told)))
    return found


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """What NCCL and gloo are told, and CUDA of its devices."""
    prefixes = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "CUDA_VISIBLE_DEVICES")
    return {name: plain(env[name], 200) for name in sorted(env) if name.startswith(prefixes)}
