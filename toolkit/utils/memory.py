"""Out of memory, reported with the setting that mends it; a limit of the memory that reading a file may take."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
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


def answer(batch: Any, recomputes: bool | None, error: Exception) -> str | None:
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
def at_most_more(size: int) -> Iterator[None]:
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
