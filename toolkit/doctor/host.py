"""What a run needs of a machine beside devices: memory, disk, shared memory, open files, a clock."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.doctor.finding import Finding, Level, size_of
from toolkit.doctor.probe import names_in, read_text, run_program

AREA = "host"
_FEW_FILES, _MANY_FILES = 4096, 65536
_LITTLE_DISK, _NO_DISK = 10e9, 1e9
_LITTLE_MEMORY = 2e9
_SMALL_SHM = 1 << 30
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Disk:
    """Where something is written, in bytes; `device` tells file systems apart."""

    what: str
    folder: str
    free: int
    device: int
    writable: bool = True
    file_slots_left: bool = True


def check(output: Path, cache: Path) -> list[Finding]:
    """Of this machine; `output` is where a run writes, `cache` where tokens are kept."""
    return [
        memory(psutil.virtual_memory().available, psutil.virtual_memory().total, _container_limit(), _cores()),
        *disks([found for what, folder in _places(output, cache).items() if (found := _disk(what, folder))]),
        *shared_memory(_shm()),
        *open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        *locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], names_in("/sys/class/infiniband")),
        *clock(_synchronised()),
    ]


def memory(available: int, total: int, limit: int | None, cores: int) -> Finding:
    """Bytes; `limit` is the container's."""
    total, available = (min(total, limit), min(available, limit)) if limit else (total, available)
    text = f"{cores} core{'s' * (cores != 1)}; {size_of(available)} of {size_of(total)} memory free"
    text += " (the container's limit)" if limit else ""
    if available >= _LITTLE_MEMORY:
        return Finding(AREA, "memory", "ok", text)
    remedy = "`ps aux --sort=-rss | head` shows who has it; `kill` what is left over"
    return Finding(AREA, "memory", "warn", f"{text}: importing the libraries takes 1 GB per process", remedy)


def _container_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = read_text(path)
        if text and text.isdigit() and int(text) < min(_NO_LIMIT, psutil.virtual_memory().total):
            return int(text)
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def disks(found: Sequence[Disk]) -> list[Finding]:
    """One line per file system with room, one for each place without."""
    findings, fine = [], dict[int, list[Disk]]()
    for disk in found:
        if fault := _disk_fault(disk):
            findings.append(fault)
        else:
            fine.setdefault(disk.device, []).append(disk)
    for places in fine.values():
        names = ", ".join(disk.what for disk in places)
        folders = ", ".join(dict.fromkeys(disk.folder for disk in places))
        text = f"{size_of(places[0].free)} free for {names} ({folders})"
        findings.insert(0, Finding(AREA, "disk", "ok", text))
    return findings


def _disk_fault(disk: Disk) -> Finding | None:
    where = f"{disk.folder} ({disk.what})"
    if not disk.writable:
        remedy = f"`sudo chown $USER {disk.folder}`, or choose another folder"
        return Finding(AREA, "disk", "fail", f"{where} cannot be written by this user", remedy)
    if not disk.file_slots_left:
        return Finding(AREA, "disk", "fail", f"{where}: no inode is left for a new file", f"`df -i {disk.folder}`")
    if disk.free < _LITTLE_DISK:
        level: Level = "fail" if disk.free < _NO_DISK else "warn"
        text = f"{size_of(disk.free)} free in {where}: a checkpoint takes 12 bytes or more per parameter"
        return Finding(AREA, "disk", level, text, f"`du -xh {disk.folder} | sort -h | tail` shows what takes the room")
    return None


def _places(output: Path, cache: Path) -> dict[str, Path]:
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface", "hub")
    return {
        "the run's output": output,
        "tokens": cache,
        "temporary files": Path(tempfile.gettempdir()),
        "models of the hub": Path(hub).expanduser(),
    }


def _disk(what: str, folder: Path) -> Disk | None:
    """Of the nearest folder above that exists: the others are made when they are needed."""
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()), None)
    try:
        if there is None:
            return None
        stat = os.statvfs(there)
        slots = stat.f_files == 0 or stat.f_favail > 0  # some file systems count none
        free = stat.f_bavail * stat.f_frsize
        return Disk(what, str(there), free, there.stat().st_dev, os.access(there, os.W_OK | os.X_OK), slots)
    except OSError:
        return None


def shared_memory(sizes: tuple[int, int] | None) -> list[Finding]:
    """(bytes in all, bytes free) of /dev/shm: NCCL between the GPUs of a machine and loaders' workers use it."""
    if sizes is None:
        return []
    total, free = sizes
    if total < _SMALL_SHM:
        remedy = (
            "`docker run --shm-size=8g ...` (or --ipc=host); in Kubernetes an emptyDir of medium Memory at /dev/shm"
        )
        text = f"/dev/shm has {size_of(total)}: NCCL and data loaders fail in so little, with a bus error"
        return [Finding(AREA, "shared memory", "warn", text, remedy)]
    text = f"{size_of(free)} of {size_of(total)} free in /dev/shm"
    if free < _SMALL_SHM // 8:
        remedy = "`ls -lat /dev/shm | head` shows what is left over; `rm` it when no run is using it"
        return [Finding(AREA, "shared memory", "warn", text, remedy)]
    return [Finding(AREA, "shared memory", "ok", text)]


def _shm() -> tuple[int, int] | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def open_files(soft: int, hard: int) -> list[Finding]:
    """The limit of open files, and how far it can be raised without root."""
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= _FEW_FILES:
        return [Finding(AREA, "open files", "ok", f"limit {'none' if soft == unlimited else soft}")]
    text = f"at most {soft} open files: data loaders and many processes run out of them"
    if hard == unlimited or hard >= _FEW_FILES:
        most = _MANY_FILES if hard == unlimited else min(_MANY_FILES, hard)
        return [Finding(AREA, "open files", "warn", text, f"ulimit -n {most}")]
    remedy = f"`* - nofile {_MANY_FILES}` in /etc/security/limits.conf, or `docker run --ulimit nofile={_MANY_FILES}`"
    return [Finding(AREA, "open files", "warn", text, remedy)]


def locked_memory(soft: int, infiniband: Sequence[str]) -> list[Finding]:
    """InfiniBand pins memory; bytes."""
    if not infiniband:
        return []
    text = f"InfiniBand devices {', '.join(infiniband)}"
    if soft == resource.RLIM_INFINITY or soft >= 1 << 33:
        return [Finding(AREA, "locked memory", "ok", f"{text}; memory may be pinned")]
    remedy = "`ulimit -l unlimited` (limits.conf: `* - memlock unlimited`; docker: --ulimit memlock=-1), or "
    remedy += "`export NCCL_IB_DISABLE=1` to do without InfiniBand"
    return [Finding(AREA, "locked memory", "warn", f"{text}, and only {size_of(soft)} may be pinned", remedy)]


def clock(synchronised: bool | None) -> list[Finding]:
    """None where the system does not say."""
    if synchronised is None:
        return []
    if synchronised:
        return [Finding(AREA, "clock", "ok", "synchronised")]
    text = "the clock is not synchronised: times in logs and checkpoints of several machines do not compare"
    return [Finding(AREA, "clock", "note", text, "sudo timedatectl set-ntp true")]


def _synchronised() -> bool | None:
    asked = run_program(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], 2.0)
    return {"yes": True, "no": False}.get(asked.out.strip()) if asked and asked.done else None
