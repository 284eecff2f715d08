"""Explains out-of-memory errors by the settings that help, and keeps freed memory."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import sys
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
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
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
    width = math.ceil(batch.inputs["input_ids"].numel() / samples)  # tokens, on average
    when = "a training step, with a micro-batch"
    size_setting = "--per_device_batch_size"
    if recomputes is None:
        when = "an evaluation (for toolkit predict: --per_device_batch_size), with a batch"
        size_setting = "--per_device_eval_batch_size"
    ways = []
    if samples > 1:
        ways.append(f"{size_setting} {samples // 2}")
        ways.append(f"--max_tokens_per_batch {max(width, samples * width // 2)}")
    if recomputes is False:
        ways.append("--gradient_checkpointing true")
    ways.append(f"--max_length {width // 2}")
    return (
        f"out of memory in {when} of {samples} x {width} tokens: pass {', or '.join(ways)} "
        f"[{first_line(error)}]"
    )


def explain_without_batch(error: Exception) -> str | None:
    """As `explain`, while a model is prepared or an optimizer steps: a smaller batch does not
    help."""
    if not is_out_of_memory(error):
        return None
    return (
        "out of memory: weights, gradients and the optimizer's state do not fit: launch with "
        "zero2, zero3 or fsdp2 (accelerate_configs/), or pass --lora_r 8 or "
        f"--freeze_layers N [{first_line(error)}]"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, in Python, numpy, torch, a driver or the system."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (
        torch and isinstance(error, torch.OutOfMemoryError)
    ):
        return True
    return isinstance(error, _ERRORS) and _MESSAGES.search(str(error)) is not None


def peak_resident_bytes() -> int:
    """This process's largest resident size: on Linux from proc(5), as getrusage(2) starts there at
    the size of the parent process."""
    status = Path("/proc/self/status")
    if status.is_file():
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))
        if peak:
            return 1024 * int(peak[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


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
    options = _KEEPING if keeps else _DEFAULTS
    for name, value in options.items():
        libc.mallopt(name, value)


@functools.cache
def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    return ctypes.CDLL(None)


@functools.cache
def machine_memory() -> int:
    """Bytes of the machine, or of the container if its limit is lower."""
    import psutil

    size = psutil.virtual_memory().total
    limit = (
        _CONTAINER_LIMIT.read_text(encoding="ascii") if _CONTAINER_LIMIT.is_file() else ""
    )
    return min(size, int(limit)) if limit.strip().isdigit() else size
