"""Which texts a BigBird can read in one batch as it reads each alone."""

from __future__ import annotations

from typing import Any

from toolkit.data.tokens import LengthBuckets, reader
from toolkit.models.bigbird.plan import full_up_to


def length_buckets(config: Any) -> LengthBuckets | None:
    """Of a model's config; None where the width of a batch changes nothing."""
    config = reader(config)
    if getattr(config, "model_type", "") != "big_bird" or config.attention_type != "block_sparse":
        return None
    return LengthBuckets(full_up_to(config.block_size, config.num_random_blocks), config.block_size)
