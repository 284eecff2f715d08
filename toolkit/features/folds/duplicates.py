"""Texts that are the same, or nearly: MinHash (Broder, 1997) with bands, in memory that grows with the number of texts
and not with its square."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

SIMILAR = 0.8
"""The share of common character 5-grams (Jaccard) from which two texts are near duplicates."""
_SHINGLE, _BANDS, _ROWS = 5, 16, 4  # of 100 pairs that are as similar as SIMILAR 99.98 share a band
_MULTIPLIERS = np.random.default_rng(20210714).integers(1, 2**63, _BANDS * _ROWS, np.uint64) * np.uint64(2) + np.uint64(
    1
)
_MIXER = np.uint64(0x9E3779B97F4A7C15)


def normalised(text: str) -> str:
    """Without what does not make another text: letter case, spaces and marks."""
    return re.sub(r"[\W_]+", " ", text.casefold()).strip() or text


def near_duplicates(texts: Sequence[str]) -> list[list[int]]:
    """Groups of places whose texts are the same after `normalised`, or similar to the group's first."""
    places_of: dict[str, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        places_of[normalised(text)].append(place)
    different = list(places_of)
    leader = list(range(len(different)))  # of each different text the first that it is like
    bands = [_band_keys(text) for text in different]
    for band in range(_BANDS):
        first_with: dict[bytes, int] = {}
        for place, keys in enumerate(bands):
            before = leader[first_with.setdefault(keys[band], place)]
            if before != leader[place] == place and similarity(different[before], different[place]) >= SIMILAR:
                leader[place] = before
    groups: dict[int, list[int]] = defaultdict(list)
    for place, text in enumerate(different):
        groups[_root(leader, place)] += places_of[text]
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _root(leader: Sequence[int], place: int) -> int:
    while leader[place] != place:
        place = leader[place]
    return place


def similarity(one: str, other: str) -> float:
    """Jaccard's, of two normalised texts."""
    first, second = _shingles(one), _shingles(other)
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def _shingles(text: str) -> np.ndarray:
    """The hashes of a text's character 5-grams, each once; (n,) uint64, one at least."""
    codes = np.frombuffer(text.ljust(_SHINGLE).encode("utf-32-le"), np.uint32).astype(np.uint64)
    hashes = np.zeros(len(codes) - _SHINGLE + 1, np.uint64)
    for offset in range(_SHINGLE):
        hashes = (hashes + codes[offset : offset + len(hashes)]) * _MIXER
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def _band_keys(text: str) -> list[bytes]:
    """What two texts have in common in a band, where the least hashes of all its rows are the same."""
    hashes = _shingles(text)
    least = np.array([((hashes * factor) >> np.uint64(32)).min() for factor in _MULTIPLIERS])
    return [part.astype(np.uint32).tobytes() for part in least.reshape(_BANDS, _ROWS)]
