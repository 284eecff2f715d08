"""Which tokens of a text are masked: decided by the seed, the epoch and the text's row, and by nothing else.

Of the chosen tokens 80 % become the mask token, 10 % a random one and 10 % stay (Devlin et al. 2019, BERT, section
3.1). How many they are follows from the number of the text's tokens alone, so that the loss denominator of a global
batch is known before anything is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

EVALUATED = 0.15
"""The part of the tokens that an evaluation masks, whatever the training does: its numbers can be compared."""


class Draw(NamedTuple):
    """What decides the masks, beside the row."""

    seed: int
    epoch: int
    """From 1; 0: those of an evaluation, the same in every run."""
    probability: float


FIXED = Draw(0, 0, EVALUATED)


def counts(maskable: np.ndarray, probability: float) -> np.ndarray:
    """(samples,) tokens that could be masked -> (samples,) int64 that are: at least 1 where there is any."""
    return np.minimum(np.maximum(np.floor(maskable * probability + 0.5), 1), maskable).astype(np.int64)


def choose(draw: Draw, row: int, maskable: np.ndarray, starts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """((n,) ascending places of the tokens to predict, (n, 2) random numbers below 1 of what becomes of each).

    `maskable` (length,) bool. With `starts` (length,) bool, the tokens that begin a word, whole words are chosen in a
    random order, but for those that are longer than what is left to choose; what then remains is the beginning of a
    word.
    """
    key = np.array([draw.seed % 2**64, draw.epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, row, 0, 0], np.uint64)))
    places = np.flatnonzero(maskable)
    count = int(counts(np.array(len(places)), draw.probability))
    if starts is None:
        chosen = places[generator.random(len(places)).argsort(kind="stable")[:count]]
    else:
        _, first, sizes = np.unique(np.cumsum(starts)[places], return_index=True, return_counts=True)
        chosen = places[_whole_words(first, sizes, generator.random(len(first)).argsort(kind="stable"), count)]
    return np.sort(chosen), generator.random((count, 2))


def _whole_words(first: np.ndarray, sizes: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """`count` of the tokens of words, of which each begins at `first` and has so many."""
    chosen, left, longer = [], count, []
    for word in order.tolist():
        if not left:
            break
        size = int(sizes[word])
        if size <= left:
            chosen.append(np.arange(first[word], first[word] + size))
            left -= size
        else:
            longer.append(word)
    if left:
        chosen.append(np.arange(first[longer[0]], first[longer[0]] + left))
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)
