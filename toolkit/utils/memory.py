"""Out of memory, reported with the setting that mends it; a limit of the memory that reading a file may take."""

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

# torch's CPU allocator, CUDA's libraries and the C++ runtime raise plain RuntimeErrors, the system an OSError, and
# a library that no longer fits is an ImportError
_KINDS = (RuntimeError, OSError, ImportError)
_MESSAGES = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|_status_alloc_failed|std::bad_alloc"
    # oneDNN says no more; where it cannot do something at all, it is a primitive *descriptor* that it cannot create
    r"|could not create a primitive$|failed to map segment",
    re.IGNORECASE | re.MULTILINE,
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_RETURNED = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
"""What glibc arrives at by itself once a program has freed large blocks."""
_KEPT_BELOW = 0.4
"""The part of its memory that a process may have taken while it keeps what it frees: heaps that are kept grew by up to
1.4 times."""


def explain(batch: Any, recomputes: bool | None, error: Exception) -> str | None:
    """What to pass where memory ran out with a batch of texts; None for every other error.

    `recomputes`: whether activations are recomputed already; None in an evaluation.
    """
    if not is_out_of_memory(error):
        return None
    samples = len(batch.ids)
    width = -(-batch.inputs["input_ids"].numel() // samples)  # on average, where a row holds several
    fewer, tokens = samples // 2, f"--max_tokens_per_batch {max(width, samples * width // 2)}"
    if recomputes is None:
        when = "an evaluation, with a batch"
        ways = [f"--per_device_eval_batch_size {fewer} (toolkit predict: --per_device_batch_size {fewer})", tokens]
    else:
        when = "a training step, with a micro-batch"
        ways = [f"--per_device_batch_size {fewer}, or {tokens} (the global batch and the losses stay the same)"]
    ways = ways if samples > 1 else []
    ways += ["--gradient_checkpointing true"] * (recomputes is False)
    ways.append(f"--max_length {width // 2}")
    where = f"{_device()} in {when} of {samples} x {width} tokens"
    return f"out of memory{where}: pass {', or '.join(ways)} [{_first_line(error)}]"


def manage_freed_memory() -> None:
    """After a step or a batch on a CPU: this process keeps the memory that it frees, until it has taken much of what
    there is; from then on it returns it. Where the C library is glibc and no variable configures it.

    By default glibc returns a tensor of more than 32 MiB when it is freed; the next one takes new pages, each of which
    the kernel clears: half of a training step's time at 512 tokens.
    """
    if _glibc() is None:
        return
    import resource

    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if peak < _KEPT_BELOW * machine_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        _keep()
    elif _keep.cache_info().currsize:
        _return()


@functools.cache  # once: a process that has returned its memory does not keep it again
def _keep() -> None:
    _glibc().mallopt(_M_MMAP_MAX, 0)
    _glibc().mallopt(_M_TRIM_THRESHOLD, -1)


@functools.cache  # once: each call would make the next step clear its pages anew
def _return() -> None:
    for name, value in _RETURNED.items():
        _glibc().mallopt(name, value)
    _glibc().malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    libc = ctypes.CDLL(None) if sys.platform == "linux" and not configured else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


@functools.cache
def machine_memory() -> int:
    """Bytes of this machine, or of the container where it is limited to less."""
    import psutil

    limit = Path("/sys/fs/cgroup/memory.max")
    most = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    return min(psutil.virtual_memory().total, int(most) if most.isdigit() else sys.maxsize)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, _KINDS) and _MESSAGES.search(str(error)) is not None


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    free, total = torch.cuda.mem_get_info()
    return f" on {torch.cuda.get_device_name()} ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if _MESSAGES.search(line)]
    return (lines[0] if lines else first_line(error))[:200]


@contextlib.contextmanager
def limit_memory(size: int) -> Iterator[None]:
    """This process gets no more than so many bytes within the block: then a MemoryError. On Linux; without effect
    elsewhere."""
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
