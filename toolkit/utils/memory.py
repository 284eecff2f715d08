"""Explains out-of-memory errors by the settings that help, keeps freed memory, and limits what a
file may allocate."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import first_line

# torch's CPU allocator, CUDA's libraries and the C++ runtime raise RuntimeError, the system
# OSError, and loading a library ImportError
_ERRORS = (RuntimeError, OSError, ImportError)
_MESSAGES = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory"
    r"|_status_alloc_failed|std::bad_alloc"
    # oneDNN's; for an unsupported operation it cannot create a primitive *descriptor*
    r"|could not create a primitive$|failed to map segment",
    re.IGNORECASE | re.MULTILINE,
)
_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_KEEPING = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}
_DEFAULTS = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
"""The values that glibc adapts to once a program has freed large blocks."""
_KEEP_BELOW = 0.4
"""Peak share of its memory up to which a process keeps what it frees: kept heaps grew by up to 1.4
times."""


def explain(batch: Any, recomputes: bool | None, error: Exception) -> str | None:
    """The settings that avoid an out-of-memory error of this batch; None for other errors.

    `recomputes`: whether gradient checkpointing is on; None in an evaluation.
    """
    if not is_out_of_memory(error):
        return None
    samples = len(batch.ids)
    width = -(-batch.inputs["input_ids"].numel() // samples)  # tokens, on average
    fewer = samples // 2
    tokens = f"--max_tokens_per_batch {max(width, samples * width // 2)}"
    ways = []
    if recomputes is None:
        when = "an evaluation, with a batch"
        size = f"--per_device_eval_batch_size {fewer}"
        smaller = [f"{size} (toolkit predict: --per_device_batch_size {fewer})", tokens]
    else:
        when = "a training step, with a micro-batch"
        same = "(the global batch and the losses stay the same)"
        smaller = [f"--per_device_batch_size {fewer}, or {tokens} {same}"]
    if samples > 1:
        ways += smaller
    if recomputes is False:
        ways.append("--gradient_checkpointing true")
    ways.append(f"--max_length {width // 2}")
    batch_size = f"{samples} x {width} tokens"
    return f"out of memory in {when} of {batch_size}: pass {', or '.join(ways)} [{_quoted(error)}]"


def explain_without_batch(error: Exception) -> str | None:
    """As `explain`, while a model is prepared or an optimizer steps: a smaller batch does not
    help."""
    if not is_out_of_memory(error):
        return None
    return (
        "out of memory: weights, gradients and the optimizer's state do not fit: launch with "
        "zero2, zero3 or fsdp2 (accelerate_configs/), or pass --optimizer lion, --lora_r 8 or "
        f"--freeze_layers N [{_quoted(error)}]"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, in Python, numpy, torch, a driver or the system."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, _ERRORS) and _MESSAGES.search(str(error)) is not None


def _quoted(error: Exception) -> str:
    for line in str(error).splitlines():
        if _MESSAGES.search(line):
            return line.strip()[:200]
    return first_line(error)[:200]


def peak_resident_bytes() -> int:
    """This process's largest resident size (proc(5)), or getrusage's, which on Linux begins at the
    size of the process that started this one."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        line = re.search(r"VmHWM:\s+(\d+) kB", status)
        if line:
            return 1024 * int(line[1])
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def manage_freed_memory() -> None:
    """Call it after each step or batch on a CPU: the process keeps what it frees until its peak is
    a large share of the machine's memory; from then on glibc returns it as usual. Only with glibc
    that no variable configures.

    By default glibc maps each tensor of more than 32 MiB anew, unless it fits into a hole of the
    heap, and the kernel clears its pages: half the time of a training step at 512 tokens.
    """
    libc = _glibc()
    if libc is None:
        return
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    keeps = peak_resident_bytes() < _KEEP_BELOW * machine_memory() / processes
    for name, value in (_KEEPING if keeps else _DEFAULTS).items():
        libc.mallopt(name, value)


@functools.cache
def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None


@functools.cache
def machine_memory() -> int:
    """Bytes of the machine, or of the container if its limit is lower."""
    import psutil

    limit, _, _ = container_memory()
    return min(psutil.virtual_memory().total, int(limit) if limit.isdigit() else sys.maxsize)


def container_memory() -> list[str]:
    """A container's memory limit, use and statistics; empty if there are none."""
    names = (("max", "limit_in_bytes"), ("current", "usage_in_bytes"), ("stat", "stat"))
    return [read_cgroup(f"memory.{second}", f"memory/memory.{first}") for second, first in names]


def read_cgroup(*names: str) -> str:
    """The first of these files of a container (version 2, then 1); empty if there is none."""
    files = (_CGROUP / name for name in names)
    return next((file.read_text(encoding="ascii").strip() for file in files if file.is_file()), "")


@contextlib.contextmanager
def limit_memory(size: int) -> Iterator[None]:
    """Limits what the process may allocate within the block to `size` bytes; beyond it MemoryError.
    On Linux only."""
    if sys.platform != "linux":
        yield
        return
    import resource

    import psutil

    limits = resource.getrlimit(resource.RLIMIT_DATA)
    most = psutil.Process().memory_info().data + size
    resource.setrlimit(resource.RLIMIT_DATA, (min(most, limits[0] % 2**63), limits[1]))  # -1: none
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
