"""Splits that have nothing but lengths."""

from pathlib import Path

import numpy as np

from toolkit.data.tokens import LengthBuckets, Split


def of_lengths(lengths: np.ndarray, buckets: LengthBuckets | None = None) -> Split:
    """Texts of so many tokens each, all the same token."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens, rows = np.ones(offsets[-1], np.int32), np.arange(len(lengths))
    return Split(
        "train", Path(), tokens, offsets, np.zeros(len(lengths), np.int64), rows, buckets=buckets
    )
