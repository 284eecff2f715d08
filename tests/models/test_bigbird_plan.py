"""The random plan is transformers' own, and numpy's generator is left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from toolkit.models.bigbird import plan
from toolkit.models.bigbird.plan import Pattern


def theirs(pattern: Pattern) -> np.ndarray:
    """The random blocks as `bigbird_block_sparse_attention` draws them: (nh, n - 2, r)."""
    length = pattern.length
    config = BigBirdConfig(
        hidden_size=4 * pattern.heads,
        num_attention_heads=pattern.heads,
        block_size=pattern.block,
        num_random_blocks=pattern.random,
        max_position_embeddings=pattern.longest,
    )
    attention = BigBirdBlockSparseAttention(config, pattern.seed).train(pattern.training)
    np.random.seed(pattern.seed)
    if length in (1024, 3072, 4096):
        longest = pattern.longest
        draws = [
            attention._bigbird_block_rand_mask(
                longest, longest, pattern.block, pattern.block, pattern.random, last_idx=1024
            )[: length // pattern.block - 2]
            for _ in range(pattern.heads)
        ]
    else:
        lengths, numbers = attention._get_rand_attn_plan(length, pattern.block, pattern.random)
        draws = attention._bigbird_block_rand_mask_with_head(
            length, length, pattern.block, pattern.block, pattern.heads, lengths, numbers
        )
    return np.stack(draws)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("seed", "heads", "block", "random", "longest"),
    [(0, 2, 64, 3, 4096), (5, 3, 64, 3, 4096), (11, 1, 64, 2, 3072), (2, 2, 16, 3, 4096), (1, 2, 32, 1, 1024)],
)
def test_the_draws_are_theirs(seed: int, heads: int, block: int, random: int, longest: int, training: bool) -> None:
    shortest = (5 + 2 * random) * block
    lengths = {shortest + block, 768, 1024, 1152, 2048, 3072, 4096}
    lengths = {length for length in lengths if shortest < length <= longest}
    assert len(lengths) > 2
    for length in sorted(lengths):
        pattern = Pattern(seed, heads, block, random, longest, length, training)
        np.testing.assert_array_equal(plan.random_blocks(pattern), theirs(pattern))


def test_a_table_made_in_inference_can_be_trained_with() -> None:
    plan.tables.cache_clear()
    with torch.inference_mode():
        made = plan.tables(Pattern(0, 2, 64, 3, 4096, 1024, True))
    assert not any(table.is_inference() for table in made.values())
