"""DeepSpeed's and torch's cache of compiled extensions: a killed build leaves a lock on which every later run hangs."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.doctor.finding import Finding

AREA = "builds"
_BUILDERS = re.compile(r"^(ninja|nvcc|cicc|ptxas|cc1plus|c\+\+|g\+\+|gcc|clang.*|hipcc|.*-g\+\+(-\d+)?)$")
_DEPTH = 3
_MOST_LOCKS = 20
_YOUNG_SECONDS = 600.0


@dataclass(frozen=True)
class Lock:
    """A lock file in the cache."""

    path: Path
    age: float
    """Seconds."""
    holder: int | None
    """The process that has it open."""
    builder: int | None
    """A compiler at work in its folder."""


def check(env: dict[str, str]) -> list[Finding]:
    """Of this machine's cache, as far as this user may look."""
    folder = cache_folder(env)
    return findings(folder, find_locks(folder))


def cache_folder(env: dict[str, str]) -> Path:
    """$TORCH_EXTENSIONS_DIR, or torch's own choice."""
    if env.get("TORCH_EXTENSIONS_DIR"):
        return Path(env["TORCH_EXTENSIONS_DIR"])
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def findings(folder: Path, locks: Sequence[Lock]) -> list[Finding]:
    """A line for each lock; one where there is none."""
    if not locks:
        state = "no lock is left" if folder.is_dir() else "nothing has been built yet"
        return [Finding(AREA, "cache", "ok", f"{folder}: {state}")]
    return [_of(lock) for lock in locks]


def _of(lock: Lock) -> Finding:
    name, age = lock.path.parent.name, f"{lock.age / 60:.0f} min" if lock.age >= 120 else f"{lock.age:.0f} s"
    alive = lock.holder or lock.builder
    if alive:
        return Finding(AREA, name, "note", f"{name} is being built by process {alive}, since {age}")
    ended = f"that was killed, or ended without removing it, {age} ago"
    elsewhere = " (or goes on at another machine that shares this folder)" if lock.age < _YOUNG_SECONDS else ""
    text = f"a lock is left of a build of {name} {ended}{elsewhere}: every run that needs {name} waits for ever"
    return Finding(AREA, name, "fail", text, f"rm {shlex.quote(str(lock.path))}")


def find_locks(
    folder: Path, now: float | None = None, processes: Callable[[], Iterable[psutil.Process]] | None = None
) -> list[Lock]:
    """torch's FileBaton makes a file `lock` beside the sources, keeps it open while it builds, and removes it."""
    paths = _lock_files(folder)
    if not paths:
        return []
    holders, builders = _at_work(paths, processes or psutil.process_iter)
    return [
        Lock(path, (now or time.time()) - modified, holders.get(path), builders.get(path.parent))
        for path in paths
        if (modified := _modified(path)) is not None  # it may just have been removed
    ]


def _lock_files(folder: Path) -> list[Path]:
    found = []
    for depth in range(1, _DEPTH + 1):
        found += [path.resolve() for path in folder.glob("/".join(["*"] * (depth - 1) + ["lock"])) if path.is_file()]
    return found[:_MOST_LOCKS]


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _at_work(
    paths: Sequence[Path], processes: Callable[[], Iterable[psutil.Process]]
) -> tuple[dict[Path, int], dict[Path, int]]:
    """(lock -> the process that has it open, folder -> a compiler whose current folder it is)."""
    wanted = {str(path) for path in paths}
    folders = {str(path.parent) for path in paths}
    holders: dict[Path, int] = {}
    builders: dict[Path, int] = {}
    for process in processes():
        if process.pid == os.getpid():
            continue
        for opened in _opened_by(process.pid) & wanted:
            holders[Path(opened)] = process.pid
        try:
            if _BUILDERS.match(process.name()) and process.cwd() in folders:
                builders[Path(process.cwd())] = process.pid
        except (psutil.Error, OSError):
            continue
    return holders, builders


def _opened_by(pid: int) -> set[str]:
    """Files a process has open; empty where this user may not know."""
    folder, found = f"/proc/{pid}/fd", set()
    try:
        for name in os.listdir(folder):  # noqa: PTH208 - links that end between two looks are common here
            found.add(os.readlink(f"{folder}/{name}"))  # noqa: PTH115
    except OSError:
        pass
    return found
