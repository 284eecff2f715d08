"""What a step has cost and reached: a line of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.utils import memory


@dataclass
class StepMetrics:
    """The numbers of a step."""

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
    logged: dict[str, float]
    """What the recipe logs by `Step.log`."""

    def line(self) -> dict[str, Any]:
        """As in metrics.jsonl."""
        own = {**vars(self)}
        logged = own.pop("logged")
        return dict(**own, **logged)  # raises TypeError for a name twice


def mean_by_name(
    by_rank: Sequence[Mapping[str, float]], denominator: float
) -> dict[str, float]:
    """Sums by name of each process -> means; NaN for a name that a process lacks."""
    means = {}
    for name in {name: None for sums in by_rank for name in sums}:
        total = sum(sums.get(name, math.nan) for sums in by_rank)
        means[name] = total / denominator
    return means


def norm_of(norm: Any) -> float:
    """From the gradient norms that strategies return: a tensor, a DTensor or a float."""
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(norm)


def peak_memory_bytes(device: torch.device) -> int:
    """Device memory if the device reports it, otherwise the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return memory.peak_resident_bytes()
