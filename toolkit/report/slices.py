"""Groups of rows in which a model is worst."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

FEWEST_ROWS = 10
_MOST_SLICES = 15


class Slice(NamedTuple):
    """Rows with something in common, and how often the model is wrong there."""

    name: str
    value: str
    rows: int
    wrong: float
    """The share that is wrong."""
    deviations: float
    """How many standard deviations of chance that is above the share of all rows."""


def worst_slices(wrong: np.ndarray, groups: Mapping[str, Sequence[str]]) -> list[Slice]:
    """Groups of the rows, by column and value, in which more are wrong than chance explains (two standard deviations),
    the clearest first. (N,) truth values; a column holds each row's value."""
    share, slices = float(wrong.mean()) if len(wrong) else 0.0, []
    for name, values in groups.items():
        by_value = defaultdict(list)
        for place, value in enumerate(values):
            by_value[value].append(place)
        for value, places in by_value.items():
            if FEWEST_ROWS <= len(places) < len(wrong) and 0 < share < 1:
                slice_share = float(wrong[places].mean())
                deviations = (slice_share - share) / math.sqrt(share * (1 - share) / len(places))
                slices.append(Slice(name, value, len(places), slice_share, deviations))
    slices.sort(key=lambda slice: -slice.deviations)
    return [slice for slice in slices if slice.deviations > 2][:_MOST_SLICES]
