"""Near-duplicate texts by MinHash (Broder, 1997) with locality-sensitive hashing, in memory linear in the texts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

SIMILAR = 0.8
"""Near duplicates have at least this Jaccard similarity of character 5-grams."""
_SHINGLE, _BANDS, _ROWS = 5, 16, 4  # of pairs with similarity SIMILAR 99.98 % share a band
_MULTIPLIERS = 2 * np.random.default_rng(20210714).integers(
    1, 2**63, _BANDS * _ROWS, np.uint64
) + np.uint64(1)
_MIXER = np.uint64(0x9E3779B97F4A7C15)


def normalise(text: str) -> str:
    """Returns the text in lower case, without punctuation and repeated spaces."""
    return re.sub(r"[\W_]+", " ", text.casefold()).strip() or text


def near_duplicates(texts: Sequence[str]) -> list[list[int]]:
    """Groups of indices whose texts are equal after `normalise`, or similar to a text of the group."""
    indices_of: dict[str, list[int]] = defaultdict(list)
    for index, text in enumerate(texts):
        indices_of[normalise(text)].append(index)
    unique = list(indices_of)
    leader = list(range(len(unique)))  # the first text similar to each
    bands = [_band_keys(text) for text in unique]
    for band in range(_BANDS):
        first_with: dict[bytes, int] = {}
        for number, keys in enumerate(bands):
            earlier = leader[first_with.setdefault(keys[band], number)]
            if (
                earlier != leader[number] == number
                and similarity(unique[earlier], unique[number]) >= SIMILAR
            ):
                leader[number] = earlier
    groups: dict[int, list[int]] = defaultdict(list)
    for number, text in enumerate(unique):
        leader[number] = leader[leader[number]]  # a leader may have got an earlier one
        groups[leader[number]] += indices_of[text]
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def similarity(one: str, other: str) -> float:
    """Jaccard similarity of the character 5-grams of two normalised texts."""
    first, second = _shingles(one), _shingles(other)
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def _shingles(text: str) -> np.ndarray:
    """(n,) uint64: the distinct hashes of a text's character 5-grams, at least one."""
    codes = np.frombuffer(text.ljust(_SHINGLE).encode("utf-32-le"), np.uint32).astype(np.uint64)
    hashes = np.zeros(len(codes) - _SHINGLE + 1, np.uint64)
    for offset in range(_SHINGLE):
        hashes = (hashes + codes[offset : offset + len(hashes)]) * _MIXER
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def _band_keys(text: str) -> list[bytes]:
    """A key for each band; equal if all MinHashes of the band are equal."""
    hashes = _shingles(text)
    minima = np.array([((hashes * factor) >> np.uint64(32)).min() for factor in _MULTIPLIERS])
    return [part.astype(np.uint32).tobytes() for part in minima.reshape(_BANDS, _ROWS)]
