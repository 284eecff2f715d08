"""What a run needs of a machine beside devices and a network: its files, room on disk, no stale lock, a clean shell."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from toolkit.errors import printable
from toolkit.features.doctor.finding import Finding
from toolkit.launch.relaunch import clean_environment
from toolkit.utils.units import size_text

_LITTLE_DISK, _NO_DISK, _SMALL_SHM = 10e9, 1e9, 1e9
# a job's own, or harmless
_MAY_STAY = ("SLURM_", "OMPI_", "PMI", "MPI_", "MV2_", "TORCH_NCCL_", "ACCELERATE_LOG_LEVEL")
_OF_NETWORK = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "CUDA_VISIBLE_DEVICES")


def check_files(files: Mapping[str, Path]) -> Iterator[Finding]:
    """`files`: setting -> the file or folder that it names."""
    for setting, path in files.items():
        quoted = shlex.quote(printable(path))
        if not path.exists():
            text, remedy = f"there is no {printable(path)} (looked in {Path.cwd()})", f"copy {quoted} to this machine"
            yield Finding("files", setting, "fail", text, f"{remedy}, or start in its folder")
        elif not os.access(path, os.R_OK):
            yield Finding(
                "files", setting, "fail", f"{printable(path)} cannot be read by this user", f"ls -la {quoted}"
            )
        else:
            size = "" if path.is_dir() else f": {size_text(path.stat().st_size)}"
            yield Finding("files", setting, "ok", f"{printable(path)}{size}")


def check_disk(output: Path) -> Iterator[Finding]:
    """Room where a run writes, and in /dev/shm, which NCCL and the workers of data loaders need."""
    # the nearest folder above that exists: the others are made when they are needed
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if path.is_dir())
    free, quoted = psutil.disk_usage(str(folder)).free, shlex.quote(str(folder))
    text = f"{size_text(free)} free in {folder} (the run's output)"
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"`sudo chown $USER {quoted}`, or another --output_dir"
        yield Finding("host", "disk", "fail", f"{folder} cannot be written by this user", remedy)
    elif free < _LITTLE_DISK:
        remedy = f"`du -xh {quoted} | sort -h | tail` shows what takes the room"
        text += ": a checkpoint takes 12 bytes or more per parameter"
        yield Finding("host", "disk", "fail" if free < _NO_DISK else "warn", text, remedy)
    else:
        yield Finding("host", "disk", "ok", text)
    shm = Path("/dev/shm")
    if shm.is_dir() and (size := psutil.disk_usage(str(shm)).total) < _SMALL_SHM:
        text = f"{shm} has {size_text(size)}: NCCL and data loaders fail in so little, with a bus error"
        yield Finding("host", "shared memory", "warn", text, "`docker run --shm-size=8g ...` (or --ipc=host)")


def check_builds(env: Mapping[str, str]) -> Iterator[Finding]:
    """torch's FileBaton makes a file `lock` while it builds; a build that is killed does not remove it."""
    folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    folder = Path(env.get("TORCH_EXTENSIONS_DIR") or folder)
    locks = [path.resolve() for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock"))]
    open_files = _open_files() if locks else set()
    if not locks:
        yield Finding("builds", "cache", "ok", f"{folder}: no lock is left")
    for lock in locks:
        name, minutes = lock.parent.name, (time.time() - lock.stat().st_mtime) / 60
        if str(lock) in open_files:
            yield Finding("builds", name, "note", f"{name} is being built (for {minutes:.0f} min now)")
            continue
        text = f"a build of {name} that was killed left a lock {minutes:.0f} min ago (or another machine that shares "
        text += f"this folder is building it): every run that needs {name} waits forever"
        yield Finding("builds", name, "fail", text, f"rm {shlex.quote(str(lock))}")


def _open_files() -> set[str]:
    """Of all processes of this user; those of other users cannot be seen."""
    paths: set[str] = set()
    for process in psutil.process_iter():
        try:
            paths.update(file.path for file in process.open_files())
        except (psutil.Error, OSError):
            continue
    return paths


def check_shell(env: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that change, without a word, what is started."""
    names = sorted(name for name in set(env) - set(clean_environment(env)) if not name.startswith(_MAY_STAY))
    if names:
        text = f"this shell has a launcher's variables: {', '.join(f'{name}={env[name]}' for name in names)}"
        yield Finding("shell", "launcher", "warn", printable(text), f"unset {shlex.join(names)}")
    if variables := [f"{name}={env[name]}" for name in sorted(env) if name.startswith(_OF_NETWORK)]:
        yield Finding("shell", "variables", "note", printable(", ".join(variables)))
