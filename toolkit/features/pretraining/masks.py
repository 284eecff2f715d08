"""Which tokens of a text are masked: decided by the seed, the epoch and the text's row, and by nothing else.

How many they are follows from the number of its tokens alone, so that the loss denominator of a global batch is known
before anything is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Draw(NamedTuple):
    """What decides the masks, beside the row."""

    seed: int
    epoch: int
    """From 1; 0: those of an evaluation, the same in every run."""
    probability: float


FIXED = Draw(0, 0, 0.15)
"""Of evaluations, whatever the training does: their numbers can be compared."""


def counts(maskable: np.ndarray, probability: float) -> np.ndarray:
    """(samples,) tokens that could be masked -> (samples,) int64 that are: at least 1 where there is any."""
    return np.minimum(np.maximum(np.floor(maskable * probability + 0.5), 1), maskable).astype(np.int64)


def choose(draw: Draw, row: int, maskable: np.ndarray, starts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """((n,) ascending places of the tokens to predict, (n, 2) random numbers below 1 of what becomes of each).

    `maskable` (length,) bool. With `starts` (length,) bool, the tokens that begin a word, whole words are chosen in a
    random order, but for those that are longer than what is left to choose; what then remains is the beginning of one.
    """
    key = np.array([draw.seed % 2**64, draw.epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, row, 0, 0], np.uint64)))
    places = np.flatnonzero(maskable)
    count = int(counts(np.array(len(places)), draw.probability))
    words = np.arange(len(places)) if starts is None else np.cumsum(starts)[places]
    _, first, sizes = np.unique(words, return_index=True, return_counts=True)
    order = generator.random(len(first)).argsort(kind="stable")
    if starts is None:
        chosen = places[order[:count]]
    else:
        chosen, left, longer = np.zeros(0, np.int64), count, []
        for begin, size in zip(first[order].tolist(), sizes[order].tolist(), strict=True):
            if size <= left:
                chosen, left = np.append(chosen, places[begin : begin + size]), left - size
            else:
                longer.append(begin)
        if left:
            chosen = np.append(chosen, places[longer[0] : longer[0] + left])
    return np.sort(chosen), generator.random((count, 2))
