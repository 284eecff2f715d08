"""Which key blocks each query block reads: transformers' random plan, with numpy's generator left as it was.

The pattern is that of BigBird (Zaheer et al. 2020, arXiv:2007.14062): the first and the last block read everything
and are read by everything, each block reads itself and its neighbours, and each reads some random blocks. Which
ones is a property of the checkpoint's code, not of its weights: `modeling_big_bird.py` seeds numpy's global generator
with the layer's index and draws. That is done here once per pattern.

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

# Lengths whose random blocks transformers draws from the first _EARLY tokens, by the paper's own rule
PAPER_LENGTHS = (1024, 3072, 4096)
_EARLY = 1024


class Pattern(NamedTuple):
    """What decides who reads whom in one layer."""

    seed: int  # the layer's index
    heads: int
    block: int  # tokens
    random: int  # blocks per query block
    longest: int  # tokens, max_position_embeddings
    length: int  # tokens of the batch: a multiple of the block for which the pattern fits
    training: bool


def random_blocks(pattern: Pattern) -> np.ndarray:
    """The random key blocks of query blocks 1 to n - 2, drawn by transformers: (nh, n - 2, r) int64.

    In evaluation all of them are block 0, as in transformers. Raises ValueError for more blocks than it draws from.
    """
    seed, heads, block, random, longest, length, training = pattern
    config = BigBirdConfig(hidden_size=heads, num_attention_heads=heads, block_size=block, num_random_blocks=random)
    with torch.device("meta"):  # without weights, for which random numbers would be drawn
        theirs = BigBirdBlockSparseAttention(config).train(training)
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        if length in PAPER_LENGTHS:  # by the paper's own rule, for the longest text whatever the batch's length
            paper = require(theirs, "_bigbird_block_rand_mask", "transformers")
            draws = [paper(longest, longest, block, block, random, _EARLY)[: length // block - 2] for _ in range(heads)]
        else:
            plan = require(theirs, "_get_rand_attn_plan", "transformers")(length, block, random)
            of_heads = require(theirs, "_bigbird_block_rand_mask_with_head", "transformers")
            draws = of_heads(length, length, block, block, heads, *plan)
    finally:
        np.random.set_state(before)
    return np.stack(draws).astype(np.int64)


def may_repeat(pattern: Pattern) -> bool:
    """Whether a query block may read a key block more than once: in evaluation block 0; in training the last
    block at 1024 tokens, which is the last one that the paper's rule draws."""
    return pattern.random > 0 and (not pattern.training or pattern.length == _EARLY)


# the 53 lengths of a model of 4096 tokens, in each of 12 layers, are 636; 24 layers of 16384 tokens have 5880
@functools.lru_cache(maxsize=8192)
def tables(pattern: Pattern, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The key blocks that each query block reads, cached on the device.

    `second` (nh, 2, 4 + r) holds those of query blocks 1 and n - 2, `middle` (nh, n - 4, 5 + r) those of the
    blocks between. They must not be written to.
    """
    blocks, draws = pattern.length // pattern.block, random_blocks(pattern)
    middle = np.arange(2, blocks - 2)
    ends = np.zeros_like(middle)
    fixed = {
        "second": np.array([[0, 1, 2, blocks - 1], [0, blocks - 3, blocks - 2, blocks - 1]]),
        "middle": np.stack([ends, middle - 1, middle, middle + 1, ends + blocks - 1], axis=-1),
    }
    random = {"second": draws[:, [0, -1]], "middle": draws[:, 1:-1]}
    # ordinary tensors although the first caller may be in inference mode: later ones may train
    with torch.inference_mode(False):
        arrays = {
            name: np.concatenate([np.broadcast_to(part, (pattern.heads, *part.shape)), random[name]], axis=-1)
            for name, part in fixed.items()
        }
        return {name: torch.tensor(table).to(device) for name, table in arrays.items()}


def counts(pattern: Pattern, width: int, device: torch.device | str) -> Tensor:
    """How often each query block reads each key block: (nh, width, width). Blocks from n on are padding, of which each
    reads itself."""
    blocks, blocks_of = pattern.length // pattern.block, tables(pattern, device)
    read = torch.eye(width, dtype=torch.int32, device=device).repeat(pattern.heads, 1, 1)
    read[:, :blocks, :blocks] = 0
    read[:, [0, blocks - 1], :blocks] = 1
    for rows, table in ((read[:, 1 : blocks - 1 : blocks - 3], blocks_of["second"]),
                        (read[:, 2 : blocks - 2], blocks_of["middle"])):  # fmt: skip
        rows.scatter_add_(-1, table, torch.ones_like(table, dtype=torch.int32))
    return read
