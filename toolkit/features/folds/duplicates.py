"""Near-duplicate texts by MinHash (Broder, 1997) with locality-sensitive hashing, in memory linear in the texts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer

SIMILAR = 0.8
"""Near duplicates have at least this Jaccard similarity of character 5-grams."""
_SHINGLE, _BANDS, _ROWS = 5, 16, 4  # of pairs with similarity SIMILAR 99.98 % share a band
_MULTIPLIERS = 2 * np.random.default_rng(20210714).integers(1, 2**63, _BANDS * _ROWS, np.uint64) + np.uint64(1)


def normalise(text: str) -> str:
    """Returns the text in lower case, without punctuation and repeated spaces."""
    return re.sub(r"[\W_]+", " ", text.casefold()).strip() or text


def near_duplicates(texts: Sequence[str]) -> list[list[int]]:
    """Groups of indices whose texts are equal after `normalise`, or similar to a text of the group."""
    indices_of: dict[str, list[int]] = defaultdict(list)
    for index, text in enumerate(texts):
        indices_of[normalise(text)].append(index)
    if not indices_of:
        return []
    vectorizer = HashingVectorizer(analyzer=_shingles, n_features=2**24, binary=True, norm=None, alternate_sign=False)
    shingles = vectorizer.transform(indices_of)  # (N, 2**24) sparse: 1 for each 5-gram of a text
    hashes, starts = shingles.indices.astype(np.uint64), shingles.indptr[:-1]
    # (N, bands * rows): the MinHashes of each text
    minima = np.stack([np.minimum.reduceat(hashes * factor, starts) for factor in _MULTIPLIERS], axis=1)
    sets = np.split(shingles.indices, starts[1:])
    leader = np.arange(len(sets))  # the first text similar to each
    for band in minima.reshape(len(sets), _BANDS, _ROWS).swapaxes(0, 1):
        first_with: dict[bytes, int] = {}
        for number, key in enumerate(band):
            earlier = leader[first_with.setdefault(key.tobytes(), number)]
            if earlier != leader[number] == number and similarity(sets[earlier], sets[number]) >= SIMILAR:
                leader[number] = earlier
    groups: dict[int, list[int]] = defaultdict(list)
    for number, indices in enumerate(indices_of.values()):
        leader[number] = leader[leader[number]]  # a leader may have got an earlier one
        groups[leader[number]] += indices
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Jaccard similarity of two sets of distinct numbers."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def _shingles(text: str) -> set[str]:
    return {text[start : start + _SHINGLE] for start in range(max(1, len(text) - _SHINGLE + 1))}
