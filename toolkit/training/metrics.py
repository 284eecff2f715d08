"""What a step has cost and reached: a line of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from toolkit.utils import memory


@dataclass
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int
    epoch: float
    loss: float
    """Mean over the global batch's samples, or their target tokens."""
    learning_rate: float
    grad_norm: float
    """The norm before clipping."""
    samples: int
    tokens: int
    """Tokens of this step, without padding."""
    samples_per_second: float
    tokens_per_second: float
    peak_memory_bytes: int
    """Maximum over processes: device memory since the first step, or resident memory on a CPU."""


def gather_by_name(
    accelerator: Accelerator,
    quantities: Mapping[str, list[Any]],
) -> dict[str, torch.Tensor]:
    """name -> (n,) numbers of this process, as tensors on its device or in Python -> name ->
    (processes, n) on the CPU. One collective and one copy to the host, whatever n is."""
    device = accelerator.device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    rows = []
    for numbers in quantities.values():
        values: Any = numbers
        if isinstance(numbers[0], torch.Tensor):
            values = torch.stack(numbers)
        rows.append(torch.as_tensor(values, device=device, dtype=dtype))
    by_rank = accelerator.gather(torch.cat(rows)[None]).cpu()
    columns = by_rank.split([len(row) for row in rows], dim=1)
    return dict(zip(quantities, columns, strict=True))


def norm_tensor(norm: Any) -> torch.Tensor:
    """A scalar, from the gradient norms that strategies return: a tensor, a DTensor or a float."""
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return torch.as_tensor(norm).detach().reshape(())


def peak_memory_bytes(device: torch.device) -> int:
    """Device memory if the device reports it, otherwise the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return memory.peak_resident_bytes()
