"""The random plan is transformers' own (tests/models/test_bigbird.py compares what comes of it)."""

from __future__ import annotations

import numpy as np
import torch

from toolkit.models.bigbird import plan
from toolkit.models.bigbird.plan import Pattern


def test_random_generators_are_left_alone() -> None:
    plan.random_blocks.cache_clear()
    before, state = np.random.get_state(), torch.get_rng_state()
    drawn = [plan.random_blocks(Pattern(seed, 2, 16, 3, 4096, 1152, True)) for seed in (0, 1)]
    assert not np.array_equal(*drawn)
    assert str(np.random.get_state()) == str(before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_table_made_in_inference_can_be_trained_with() -> None:
    plan.tables.cache_clear()
    with torch.inference_mode():
        made = plan.tables(Pattern(0, 2, 64, 3, 4096, 1024, True))
    assert not any(table.is_inference() for table in made.values())
