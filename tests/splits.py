"""Splits that have nothing but lengths, and their global batches."""

from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.batches import epoch_order
from toolkit.data.tokens import LengthBuckets, Split


def of_lengths(lengths: np.ndarray, buckets: LengthBuckets | None = None) -> Split:
    """Texts of so many tokens each, all the same token."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens, rows = np.ones(offsets[-1], np.int32), np.arange(len(lengths))
    return Split(
        "train", Path(), tokens, offsets, np.zeros(len(lengths), np.int64), rows, buckets=buckets
    )


def global_batches(lengths: np.ndarray, size: int, *order: Any) -> list[np.ndarray]:
    """`order`: seed, epoch, and what follows in `epoch_order`."""
    samples = epoch_order(lengths, size, *order)
    return [samples[start : start + size] for start in range(0, len(samples), size)]
