"""The random plan is transformers' own, and numpy's generator is left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from toolkit.models.bigbird import plan
from toolkit.models.bigbird.plan import Pattern


def theirs(pattern: Pattern, length: int, training: bool) -> np.ndarray:
    """The random blocks as `bigbird_block_sparse_attention` draws them: (nh, n - 2, r)."""
    config = BigBirdConfig(
        hidden_size=4 * pattern.heads,
        num_attention_heads=pattern.heads,
        block_size=pattern.block,
        num_random_blocks=pattern.random,
        max_position_embeddings=pattern.longest,
    )
    attention = BigBirdBlockSparseAttention(config, pattern.seed).train(training)
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


PATTERNS = [
    Pattern(seed=0, heads=2, block=64, random=3, longest=4096),
    Pattern(seed=5, heads=3, block=64, random=3, longest=4096),
    Pattern(seed=11, heads=1, block=64, random=2, longest=3072),
    Pattern(seed=2, heads=2, block=16, random=3, longest=4096),
    Pattern(seed=1, heads=2, block=32, random=1, longest=1024),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: f"b{pattern.block}r{pattern.random}")
def test_the_draws_are_theirs(pattern: Pattern, training: bool) -> None:
    lengths = {pattern.shortest + pattern.block, 768, 1024, 1152, 2048, 3072, 4096}
    lengths = {length for length in lengths if pattern.shortest < length <= pattern.longest}
    assert len(lengths) > 2
    for length in sorted(lengths):
        np.testing.assert_array_equal(plan.random_blocks(pattern, length, training), theirs(pattern, length, training))


def test_a_table_made_in_inference_can_be_trained_with() -> None:
    plan.rows_of.cache_clear()
    with torch.inference_mode():
        tables = plan.rows_of(PATTERNS[0], 1024, True, False)
    assert not any(rows.table.is_inference() for rows in tables)
