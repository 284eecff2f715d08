"""Which key blocks each query block reads: transformers' random blocks, without changing numpy's
generator.

In BigBird's pattern (Zaheer et al. 2020, arXiv:2007.14062) the first and the last block read all
blocks and are read by all, and each block reads itself, its neighbours and some random blocks.
transformers draws these in code (`modeling_big_bird.py`): it seeds numpy's global generator with
the layer's index. Here that is done once per pattern.

nh heads, b block size, n = length / b blocks, r random blocks, W key blocks of a query block
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from toolkit.utils.compat import require

# For these lengths transformers draws random blocks from the first _RANDOM_RANGE tokens, by the
# paper's rule
_PAPER_LENGTHS = (1024, 3072, 4096)
_RANDOM_RANGE = 1024


class Pattern(NamedTuple):
    """Determines the key blocks of all query blocks of one layer."""

    seed: int  # the layer's index
    heads: int
    block: int  # tokens
    random: int  # blocks per query block
    longest: int  # tokens, max_position_embeddings
    length: int  # tokens of the batch: a multiple of the block for which the pattern fits
    training: bool


def random_blocks(pattern: Pattern) -> np.ndarray:
    """The random key blocks of query blocks 1 to n - 2, as transformers draws them: (nh, n - 2, r)
    int64.

    In evaluation all are block 0, as in transformers. Raises ValueError for more blocks than it can
    draw.
    """
    before = np.random.get_state()
    np.random.seed(pattern.seed)
    try:
        return np.stack(_draw(pattern)).astype(np.int64)
    finally:
        np.random.set_state(before)


def _draw(pattern: Pattern) -> list[np.ndarray]:
    """For each head (n - 2, r) blocks, from numpy's global generator."""
    _, heads, block, random, longest, length, training = pattern
    config = BigBirdConfig(
        hidden_size=heads,
        num_attention_heads=heads,
        block_size=block,
        num_random_blocks=random,
    )
    # without weights, whose initialization would draw random numbers
    with torch.device("meta"):
        layer = BigBirdBlockSparseAttention(config).train(training)
    if length in _PAPER_LENGTHS:
        # by the paper's rule, for the longest text, not the batch's length
        paper = require(layer, "_bigbird_block_rand_mask", "transformers")
        rows = length // block - 2
        sizes = (longest, longest, block, block, random, _RANDOM_RANGE)
        return [paper(*sizes)[:rows] for _ in range(heads)]
    plan = require(layer, "_get_rand_attn_plan", "transformers")(length, block, random)
    of_heads = require(layer, "_bigbird_block_rand_mask_with_head", "transformers")
    draws: list[np.ndarray] = of_heads(length, length, block, block, heads, *plan)
    return draws


def may_repeat(pattern: Pattern) -> bool:
    """Whether a query block may read a key block more than once: in evaluation block 0, in training
    the last block at 1024 tokens, up to which the paper's rule draws; with blocks of 512 and more
    it draws from all tokens."""
    if pattern.random == 0:
        return False
    has_large_blocks = 2 * pattern.block >= _RANDOM_RANGE
    return not pattern.training or has_large_blocks or pattern.length == _RANDOM_RANGE


# the 53 lengths of a model of 4096 tokens, in each of 12 layers, are 636; 24 layers of 16384 tokens
# have 5880
@functools.lru_cache(maxsize=8192)
def tables(pattern: Pattern, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The key blocks that each query block reads, cached on the device; do not write to them.

    `second` (nh, 2, 4 + r) is for query blocks 1 and n - 2, `middle` (nh, n - 4, 5 + r) for those
    between; the random blocks stand last.
    """
    blocks = pattern.length // pattern.block
    last = blocks - 1
    middle = np.arange(2, blocks - 2)
    ends = np.zeros_like(middle)
    draws = random_blocks(pattern)
    second = np.array([[0, 1, 2, last], [0, last - 2, last - 1, last]])
    window = np.stack([ends, middle - 1, middle, middle + 1, ends + last], axis=-1)
    with torch.inference_mode(False):  # inference tensors would fail in training
        return {
            "second": _table(second, draws[:, [0, -1]]).to(device),
            "middle": _table(window, draws[:, 1:-1]).to(device),
        }


def _table(fixed: np.ndarray, random: np.ndarray) -> Tensor:
    """(R, W) blocks of every head and (nh, R, r) -> (nh, R, W + r)."""
    of_heads = np.broadcast_to(fixed, (len(random), *fixed.shape))
    return torch.tensor(np.concatenate([of_heads, random], axis=-1))


def counts(pattern: Pattern, width: int, device: torch.device | str) -> Tensor:
    """How often each query block reads each key block: (nh, width, width). Blocks from n on are
    padding, and read only themselves."""
    blocks = pattern.length // pattern.block
    table_of = tables(pattern, device)
    read = torch.eye(width, dtype=torch.int32, device=device).repeat(pattern.heads, 1, 1)
    read[:, :blocks, :blocks] = 0
    read[:, [0, blocks - 1], :blocks] = 1
    rows_of = {
        "second": read[:, 1 : blocks - 1 : blocks - 3],
        "middle": read[:, 2 : blocks - 2],
    }
    for name, rows in rows_of.items():
        ones = torch.ones_like(table_of[name], dtype=torch.int32)
        rows.scatter_add_(-1, table_of[name], ones)
    return read
