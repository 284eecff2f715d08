"""Attention computed for some heads at a time, whose scores fit a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

Group = tuple[slice, slice]
"""Samples and heads."""


def head_groups(samples: int, heads: int, at_once: int) -> Iterator[Group]:
    """Groups of at most `at_once` heads, at least one: all heads of some samples, or some heads of
    one sample."""
    at_once = max(1, at_once)
    some_samples = max(1, at_once // heads)
    some_heads = min(heads, at_once)
    for sample in range(0, samples, some_samples):
        for head in range(0, heads, some_heads):
            last_sample = min(sample + some_samples, samples)
            last_head = min(head + some_heads, heads)
            yield slice(sample, last_sample), slice(head, last_head)


def like_projection(states: Tensor) -> Tensor:
    """Empty (B, nh, S, hs) with the memory layout (B, S, nh, hs), for the next projection."""
    samples, heads, length, head_size = states.shape
    return states.new_empty(samples, length, heads, head_size).transpose(1, 2)
