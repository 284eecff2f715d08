"""Which key blocks each query block reads: transformers' random plan, drawn without touching numpy's generator.

The pattern is that of BigBird (Zaheer et al. 2020, arXiv:2007.14062): the first and the last block read everything
and are read by everything, each block reads itself and its neighbours, and each reads some random blocks. Which
ones is a property of the checkpoint's code, not of its weights: `modeling_big_bird.py` seeds numpy's global generator
with the layer's index and draws. The draws here are the same ones (tests/models/test_bigbird_plan.py), from a
generator of their own, once per (pattern, length, training or not).

nh heads, S tokens, b block size, n = S / b blocks, r random blocks, W key blocks of a query block
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from toolkit.pretrained import full_attention_up_to

# Lengths whose random blocks transformers draws from the first _EARLY tokens, by the paper's own rule
_PAPER_LENGTHS = (1024, 3072, 4096)
_EARLY = 1024


@dataclass(frozen=True)
class Pattern:
    """What decides one layer's pattern, but for the length of the batch."""

    seed: int  # the layer's index
    heads: int
    block: int  # tokens
    random: int  # blocks per query block
    longest: int  # tokens, max_position_embeddings

    @property
    def shortest(self) -> int:
        """Tokens up to which the pattern does not fit and transformers runs full attention."""
        return full_attention_up_to(self.block, self.random)

    @property
    def layout(self) -> list[int]:
        """The fields in their order, as torch's operators take them."""
        return [self.seed, self.heads, self.block, self.random, self.longest]


class Rows(NamedTuple):
    """Query blocks that read equally many key blocks."""

    blocks: slice  # of the n query blocks
    table: torch.Tensor  # (nh, rows, W) int64: the key blocks each of them reads; repeats count as often


@functools.lru_cache(maxsize=512)
def random_blocks(pattern: Pattern, length: int, training: bool) -> np.ndarray:
    """The random key blocks of query blocks 1 to n - 2: (nh, n - 2, r) int64, not writable.

    In evaluation all of them are block 0, as in transformers. `length` is in tokens, a multiple of the block.
    """
    blocks = length // pattern.block
    if not training:
        drawn = np.zeros((pattern.heads, blocks - 2, pattern.random), dtype=np.int64)
    elif length in _PAPER_LENGTHS:
        generator = np.random.RandomState(pattern.seed)
        drawn = np.stack([_paper_draws(pattern, generator)[: blocks - 2] for _ in range(pattern.heads)])
    else:
        drawn = _early_draws(pattern, blocks, np.random.RandomState(pattern.seed))
    drawn.setflags(write=False)
    return drawn


def _paper_draws(pattern: Pattern, generator: np.random.RandomState) -> np.ndarray:
    """`_bigbird_block_rand_mask`, one head: (longest / b - 2, r). It draws for the longest sequence, whatever
    the batch's length; in short ones the last block may be drawn although it is read anyway."""
    blocks = pattern.longest // pattern.block
    middle = np.arange(1, blocks - 1, dtype=np.int64)
    last = _EARLY // pattern.block - 1 if 2 * pattern.block < _EARLY else blocks - 1
    drawn = np.zeros((blocks - 2, pattern.random), dtype=np.int64)
    for row in range(1, blocks - 1):
        drawn[row - 1] = generator.permutation(_paper_choices(middle, row, last, blocks))[: pattern.random]
    return drawn


def _paper_choices(middle: np.ndarray, row: int, last: int, blocks: int) -> np.ndarray:
    if row <= 2:
        return middle[row + 1 : last]
    if row >= blocks - 3:
        return middle[:last]
    start = row - 2
    if start > last:
        return middle[:last]
    if row + 1 == last:
        return middle[:start]
    return np.concatenate((middle[:start], middle[row + 1 : last]))


def _early_draws(pattern: Pattern, blocks: int, generator: np.random.RandomState) -> np.ndarray:
    """`_bigbird_block_rand_mask_with_head`: (nh, n - 2, r), all from the first 5 + 2 r blocks."""
    early = pattern.shortest // pattern.block
    drawn = np.zeros((pattern.heads, blocks - 2, pattern.random), dtype=np.int64)
    for row in range(1, blocks - 1):
        refused = {row - 1, row, row + 1, 0, early - 1}
        refused |= {early - 2} if row == 1 else set()
        refused |= {1} if row == early - 2 else set()
        for head in range(pattern.heads):
            shuffled = generator.permutation(early)
            drawn[head, row - 1] = [block for block in shuffled if block not in refused][: pattern.random]
    return drawn


def key_blocks(pattern: Pattern, length: int, training: bool, merge: bool) -> tuple[tuple[slice, np.ndarray], ...]:
    """The query blocks between the first and the last one with the key blocks they read: (nh, rows, W) each.

    With `merge`, the r repeats of block 0 in evaluation are left out: its scores then need log(`repeats`).
    """
    blocks, heads = length // pattern.block, pattern.heads
    drawn = random_blocks(pattern, length, training)
    if merge and not training:
        drawn = drawn[:, :, :0]
    middle = np.arange(2, blocks - 2)
    ends = np.zeros_like(middle)
    fixed = np.stack([ends, middle - 1, middle, middle + 1, ends + blocks - 1], axis=-1)  # (n - 4, 5)
    second = np.array([[0, 1, 2, blocks - 1], [0, blocks - 3, blocks - 2, blocks - 1]])
    return (
        (slice(1, blocks - 1, blocks - 3), _beside(second, drawn[:, [0, -1]], heads)),
        (slice(2, blocks - 2), _beside(fixed, drawn[:, 1:-1], heads)),
    )


def _beside(fixed: np.ndarray, drawn: np.ndarray, heads: int) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate([np.broadcast_to(fixed, (heads, *fixed.shape)), drawn], axis=-1))


def repeats(pattern: Pattern, training: bool) -> int:
    """How often a merged table's block 0 counts."""
    return 1 if training else 1 + pattern.random


@functools.lru_cache(maxsize=512)
def rows_of(
    pattern: Pattern, length: int, training: bool, merge: bool, device: torch.device | str = "cpu"
) -> tuple[Rows, ...]:
    """`key_blocks` as tensors, kept on the device."""
    # an ordinary tensor although the first caller may be in inference mode: later ones may train
    with torch.inference_mode(False):
        return tuple(
            Rows(blocks, torch.tensor(table, device=device))
            for blocks, table in key_blocks(pattern, length, training, merge)
        )


def may_repeat(pattern: Pattern, length: int, training: bool) -> bool:
    """Whether a query block may read a key block more than once: in evaluation block 0; in training the last
    block at 1024 tokens, which is the last one that the paper's rule draws."""
    return pattern.random > 0 and (not training or length == _EARLY)


def counts(pattern: Pattern, length: int, training: bool) -> np.ndarray:
    """How often each query block reads each key block: (nh, n, n) int32. The multiplicities of the softmax."""
    blocks = length // pattern.block
    counted = np.zeros((pattern.heads, blocks, blocks), dtype=np.int32)
    counted[:, [0, -1]] = 1
    for chosen, table in key_blocks(pattern, length, training, merge=False):
        heads, rows, _ = np.ogrid[: table.shape[0], : table.shape[1], :1]
        np.add.at(counted, (heads, np.arange(blocks)[chosen][rows], table), 1)
    return counted


@functools.lru_cache(maxsize=512)
def counts_of(pattern: Pattern, length: int, training: bool, device: torch.device | str) -> torch.Tensor:
    """`counts`, kept on the device."""
    with torch.inference_mode(False):
        return torch.tensor(counts(pattern, length, training), device=device)
