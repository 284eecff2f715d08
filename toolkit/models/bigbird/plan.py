"""Which key blocks each query block reads: transformers' random blocks, without changing numpy's generator.

In BigBird's pattern (Zaheer et al. 2020, arXiv:2007.14062) the first and the last block read all blocks and are read by
all, and each block reads itself, its neighbours and some random blocks. transformers draws these in code
(`modeling_big_bird.py`): it seeds numpy's global generator with the layer's index. Here that is done once per pattern.

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

# For these lengths transformers draws random blocks from the first _RANDOM_RANGE tokens, by the paper's rule
PAPER_LENGTHS = (1024, 3072, 4096)
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
    """The random key blocks of query blocks 1 to n - 2, as transformers draws them: (nh, n - 2, r) int64.

    In evaluation all are block 0, as in transformers. Raises ValueError for more blocks than it can draw.
    """
    seed, heads, block, random, longest, length, training = pattern
    config = BigBirdConfig(
        hidden_size=heads, num_attention_heads=heads, block_size=block, num_random_blocks=random
    )
    with torch.device("meta"):  # without weights, whose initialization would draw random numbers
        layer = BigBirdBlockSparseAttention(config).train(training)
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        if (
            length in PAPER_LENGTHS
        ):  # by the paper's rule, for the longest text, not the batch's length
            paper = require(layer, "_bigbird_block_rand_mask", "transformers")
            rows = length // block - 2
            draws = [
                paper(longest, longest, block, block, random, _RANDOM_RANGE)[:rows]
                for _ in range(heads)
            ]
        else:
            plan = require(layer, "_get_rand_attn_plan", "transformers")(length, block, random)
            of_heads = require(layer, "_bigbird_block_rand_mask_with_head", "transformers")
            draws = of_heads(length, length, block, block, heads, *plan)
    finally:
        np.random.set_state(before)
    return np.stack(draws).astype(np.int64)


def may_repeat(pattern: Pattern) -> bool:
    """Whether a query block may read a key block more than once: in evaluation block 0, in training the last block at
    1024 tokens, up to which the paper's rule draws; with blocks of 512 and more it draws from all tokens."""
    large = 2 * pattern.block >= _RANDOM_RANGE
    return pattern.random > 0 and (not pattern.training or large or pattern.length == _RANDOM_RANGE)


def tables(pattern: Pattern, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The key blocks that each query block reads, cached on the device; do not write to them.

    `second` (nh, 2, 4 + r) is for query blocks 1 and n - 2, `middle` (nh, n - 4, 5 + r) for those between.
    """
    blocks_of = cached_tables(pattern, device)
    if (
        type(blocks_of["middle"]) is not Tensor
    ):  # without data (FakeTensorMode, which estimates memory): for this call
        cached_tables.cache_clear()
    return blocks_of


# the 53 lengths of a model of 4096 tokens, in each of 12 layers, are 636; 24 layers of 16384 tokens have 5880
@functools.lru_cache(maxsize=8192)
def cached_tables(pattern: Pattern, device: torch.device | str) -> dict[str, Tensor]:
    blocks, draws = pattern.length // pattern.block, random_blocks(pattern)
    middle = np.arange(2, blocks - 2)
    ends = np.zeros_like(middle)
    fixed = {
        "second": np.array([[0, 1, 2, blocks - 1], [0, blocks - 3, blocks - 2, blocks - 1]]),
        "middle": np.stack([ends, middle - 1, middle, middle + 1, ends + blocks - 1], axis=-1),
    }
    random = {"second": draws[:, [0, -1]], "middle": draws[:, 1:-1]}
    # inference tensors would fail in training
    with torch.inference_mode(False):
        arrays = {
            name: np.concatenate(
                [np.broadcast_to(part, (pattern.heads, *part.shape)), random[name]], axis=-1
            )
            for name, part in fixed.items()
        }
        return {name: torch.tensor(table).to(device) for name, table in arrays.items()}


def counts(pattern: Pattern, width: int, device: torch.device | str) -> Tensor:
    """How often each query block reads each key block: (nh, width, width). Blocks from n on are padding, and read only
    themselves."""
    blocks, blocks_of = pattern.length // pattern.block, tables(pattern, device)
    read = torch.eye(width, dtype=torch.int32, device=device).repeat(pattern.heads, 1, 1)
    read[:, :blocks, :blocks] = 0
    read[:, [0, blocks - 1], :blocks] = 1
    for rows, table in ((read[:, 1 : blocks - 1 : blocks - 3], blocks_of["second"]),
                        (read[:, 2 : blocks - 2], blocks_of["middle"])):  # fmt: skip
        rows.scatter_add_(-1, table, torch.ones_like(table, dtype=torch.int32))
    return read
