"""What a run needs of a machine beside devices: room on disk, no stale lock of a build, a clean shell."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from toolkit.doctor.finding import Finding, plain, size_of

_LITTLE_DISK, _NO_DISK = 10e9, 1e9
_SMALL_SHM = 1 << 30
_LEFT_OVER = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE|TORCHELASTIC_.*|ACCELERATE_.*|FSDP_.*)$"
)
# set by people for their own use of accelerate, and harmless
_MEANT = ("ACCELERATE_LOG_LEVEL", "ACCELERATE_DISABLE_RICH")


def check(output: Path, cache: Path) -> list[Finding]:
    """Checks this machine; `output` is where a run writes, `cache` where tokens are kept."""
    return [check_disk("the run's output", output), check_disk("tokens", cache), *check_shared_memory()]


def check_disk(what: str, folder: Path) -> Finding:
    """Looks at the nearest folder above that exists: the others are made when they are needed."""
    folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free, where = psutil.disk_usage(str(folder)).free, f"{folder} ({what})"
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"`sudo chown $USER {folder}`, or choose another folder"
        return Finding("host", "disk", "fail", f"{where} cannot be written by this user", remedy)
    if free < _LITTLE_DISK:
        text = f"{size_of(free)} free in {where}: a checkpoint takes 12 bytes or more per parameter"
        remedy = f"`du -xh {folder} | sort -h | tail` shows what takes the room"
        return Finding("host", "disk", "fail" if free < _NO_DISK else "warn", text, remedy)
    return Finding("host", "disk", "ok", f"{size_of(free)} free in {where}")


def check_shared_memory(path: str = "/dev/shm") -> list[Finding]:
    """NCCL between the GPUs of a machine and data loaders' workers need it."""
    if not Path(path).is_dir():
        return []
    usage = psutil.disk_usage(path)
    text = f"{size_of(usage.free)} of {size_of(usage.total)} free in {path}"
    if usage.free >= _SMALL_SHM // 8 and usage.total >= _SMALL_SHM:
        return [Finding("host", "shared memory", "ok", text)]
    text += ": NCCL and data loaders fail in so little, with a bus error"
    remedy = "`docker run --shm-size=8g ...` (or --ipc=host); in Kubernetes an emptyDir of medium Memory at /dev/shm; "
    remedy += f"`ls -lat {path} | head` shows what is left over"
    return [Finding("host", "shared memory", "warn", text, remedy)]


def check_builds(env: Mapping[str, str]) -> list[Finding]:
    """Torch's FileBaton makes a file `lock` and keeps it open while it builds; a killed build leaves it behind."""
    folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    folder = Path(env.get("TORCH_EXTENSIONS_DIR") or folder)
    locks = [path.resolve() for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock"))]
    if not locks:
        state = "no lock is left" if folder.is_dir() else "nothing has been built yet"
        return [Finding("builds", "cache", "ok", f"{folder}: {state}")]
    holders = _holders({str(lock) for lock in locks})
    return [_lock_finding(lock, holders.get(str(lock))) for lock in locks if lock.exists()]


def _lock_finding(lock: Path, holder: int | None) -> Finding:
    name, minutes = lock.parent.name, (time.time() - lock.stat().st_mtime) / 60
    if holder:
        return Finding("builds", name, "note", f"{name} is being built by process {holder}, since {minutes:.0f} min")
    text = f"a lock is left of a build of {name} that was killed {minutes:.0f} min ago (or goes on at another machine "
    text += f"that shares this folder): every run that needs {name} waits for ever"
    return Finding("builds", name, "fail", text, f"rm {shlex.quote(str(lock))}")


def _holders(paths: set[str]) -> dict[str, int]:
    """Path -> the process that has it open; of other users' processes nothing can be seen."""
    found: dict[str, int] = {}
    for process in psutil.process_iter():
        try:
            found.update({opened.path: process.pid for opened in process.open_files() if opened.path in paths})
        except (psutil.Error, OSError):
            continue
    return found


def check_shell(env: Mapping[str, str], config_given: bool) -> list[Finding]:
    """Variables and files that change what is started, silently."""
    found = []
    if names := sorted(name for name in env if _LEFT_OVER.match(name) and name not in _MEANT):
        text = f"this shell holds a launcher's variables: {', '.join(f'{name}={env[name]}' for name in names)}"
        found.append(Finding("shell", "launcher", "warn", plain(text), f"unset {' '.join(names)}"))
    if told := ", ".join(f"{name}={value}" for name, value in variables(env).items()):
        found.append(Finding("shell", "variables", "note", plain(told)))
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    path = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    if path.is_file() and not config_given:
        text = f"`accelerate launch` without --config_file takes {path}, and does not say so"
        found.append(
            Finding("shell", "accelerate", "note", text, "--config_file accelerate_configs/single.yaml (or another)")
        )
    return found


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """What NCCL and gloo are told, and CUDA of its devices."""
    prefixes = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "CUDA_VISIBLE_DEVICES")
    return {name: plain(env[name], 200) for name in sorted(env) if name.startswith(prefixes)}
