"""Dropout on a CPU in a fraction of its time.

torch draws the numbers of `bernoulli_` on a CPU one after another in one thread, each from 32 bits or more: a fifth to
a quarter of a training step of BERT. Here four of them come from 64 bits of the same generator.
"""

from __future__ import annotations

import functools
import warnings

import torch

_STEPS = 1 << 16
"""A probability is rounded to as many parts: by less than 1e-5. FlashAttention on a GPU rounds it to 1/255."""

_AT_ONCE = 1 << 18
"""Numbers whose bits stay in a core's cache."""


@functools.cache
def draw_dropout_faster() -> None:
    """From now on `bernoulli_(p)` on a CPU, which every dropout calls, is `bernoulli` below, in this process."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes another kernel's place
        library.impl("bernoulli_.float", bernoulli)
    _libraries.append(library)  # it ends with the object


_libraries: list[torch.library.Library] = []


def bernoulli(into: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fills a tensor with 1 with probability `p`, rounded to 2**-16, and 0 otherwise. Returns it."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    if not into.is_contiguous():
        return into.copy_(
            bernoulli(torch.empty_like(into, memory_format=torch.contiguous_format), p, generator=generator)
        )
    below, draws = round(p * _STEPS), torch.empty(_AT_ONCE // 4, dtype=torch.int64)
    if not 0 < below < _STEPS:
        return into.fill_(below > 0)
    for part in into.view(-1).split(_AT_ONCE):
        drawn = draws[: -(-len(part) // 4)].random_(-(2**63), None, generator=generator).view(torch.int16)
        torch.lt(drawn[: len(part)], below - _STEPS // 2, out=part)
    return into
