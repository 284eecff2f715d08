"""The Accelerator of a run on CPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

_CHUNK = 1 << 14
"""Numbers that are summed in fp32: the error stays below 1e-7."""


class CPUAccelerator(Accelerator):
    """Clips by the exact norm. torch's sums a whole tensor in fp32: on a CPU that of an embedding
    of 16 million numbers is wrong by 1e-5 to 6e-4, and that of its shards is not.

    Not for DeepSpeed, which clips by itself."""

    def clip_grad_norm_(
        self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: int = 2
    ) -> Any:
        """The norm of all gradients before clipping, () float64."""
        parameters = list(parameters)
        if norm_type != 2:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        gradients = [each.grad for each in parameters if each.grad is not None]
        shards = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        squares = sum_of_squares(shards)
        if any(isinstance(each, DTensor) for each in gradients):  # FSDP2
            torch.distributed.all_reduce(squares)
        norm = squares.sqrt()
        if norm > max_norm:
            torch._foreach_mul_(shards, max_norm / (float(norm) + 1e-6))
        return norm


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """() float64."""
    chunks = [chunk for tensor in tensors for chunk in tensor.flatten().split(_CHUNK)]
    if not chunks:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(chunks)).double().square().sum()
