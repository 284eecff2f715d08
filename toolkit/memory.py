"""Out of memory, said with the setting that mends it."""

from __future__ import annotations

import re
import sys
from typing import Any, Protocol

# torch's CPU allocator, CUDA's libraries and the C++ runtime raise plain RuntimeErrors, the system an OSError, and
# a library that no longer fits is an ImportError
_KINDS = (RuntimeError, OSError, ImportError)
_SAID = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|_status_alloc_failed|std::bad_alloc"
    # oneDNN says no more; where it cannot do something at all, it is a primitive *descriptor* that it cannot create
    r"|could not create a primitive$|failed to map segment",
    re.IGNORECASE | re.MULTILINE,
)


class Padded(Protocol):
    """A micro-batch."""

    @property
    def inputs(self) -> dict[str, Any]: ...


def of_training(batch: Padded, recomputes: bool, error: Exception) -> str | None:
    """The answer to `error` where it is memory that ran out in a training step; None for every other.

    `recomputes`: whether activations are recomputed already.
    """
    samples, width = batch.inputs["input_ids"].shape
    ways = [f"--max_length {width // 2}"]
    if samples > 1:
        fewer = f"--per_device_batch_size {samples // 2}, or --max_tokens_per_batch {max(width, samples * width // 2)}"
        ways.insert(0, f"{fewer} (the global batch and the losses stay the same)")
    if not recomputes:
        ways.insert(-1, "--gradient_checkpointing true")
    return _answer(error, f"in a training step, with a micro-batch of {samples} x {width} tokens", ways)


def of_evaluation(batch: Padded, error: Exception) -> str | None:
    """The same for evaluation and prediction."""
    samples, width = batch.inputs["input_ids"].shape
    ways = [f"--max_length {width // 2}"]
    if samples > 1:
        fewer = samples // 2
        ways.insert(0, f"--per_device_eval_batch_size {fewer} (toolkit predict: --per_device_batch_size {fewer})")
        ways.insert(1, f"--max_tokens_per_batch {max(width, samples * width // 2)}")
    return _answer(error, f"in an evaluation, with a batch of {samples} x {width} tokens", ways)


def _answer(error: Exception, when: str, ways: list[str]) -> str | None:
    if not is_out_of_memory(error):
        return None
    return f"out of memory{_device()} {when}: pass {', or '.join(ways)} [{_first_line(error)}]"


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, _KINDS) and _SAID.search(str(error)) is not None


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    free, total = torch.cuda.mem_get_info()
    return f" on {torch.cuda.get_device_name()} ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if _SAID.search(line)]
    return (said or lines or [type(error).__name__])[0][:200]
