"""A faster `bernoulli_`, and so faster dropout, on a CPU.

torch draws the numbers of `bernoulli_` on a CPU one by one in one thread, from at least 32 bits
each, which takes a fifth to a quarter of a training step of BERT. This one draws four numbers from
64 bits of the same generator.
"""

from __future__ import annotations

import functools
import warnings

import torch

# A probability is rounded to 1 / _STEPS, by less than 1e-5. FlashAttention on a GPU rounds to 1/255
_STEPS = 1 << 16
# numbers whose bits fit a core's cache
_CHUNK = 1 << 18


@functools.cache
def install() -> torch.library.Library:
    """Registers `bernoulli_(p)` for CPUs, which every dropout calls, in this process."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the replaced kernel
        library.impl("bernoulli_.float", bernoulli)
    return library  # cached: the kernel is removed with this object


def bernoulli(
    into: torch.Tensor,
    p: float = 0.5,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Fills a tensor with 1 with probability `p` (rounded to 2**-16) and else 0, in place, and
    returns it."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    if not into.is_contiguous():
        return into.copy_(bernoulli(into.new_empty(into.shape), p, generator=generator))
    below = round(p * _STEPS)
    if not 0 < below < _STEPS:
        return into.fill_(below > 0)
    draws = torch.empty(_CHUNK // 4, dtype=torch.int64)
    for part in into.view(-1).split(_CHUNK):
        count = -(-len(part) // 4)
        bits = draws[:count].random_(-(2**63), None, generator=generator)
        numbers = bits.view(torch.int16)[: len(part)]
        torch.lt(numbers, below - _STEPS // 2, out=part)
    return into
