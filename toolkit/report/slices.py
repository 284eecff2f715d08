"""Groups of rows in which a model is worst."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

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
    for name, values in groups.items() if 0 < share < 1 else ():
        for value, rows, slice_share in pd.Series(wrong).groupby(list(values)).agg(["size", "mean"]).itertuples():
            if FEWEST_ROWS <= rows < len(wrong):
                deviations = (slice_share - share) / math.sqrt(share * (1 - share) / rows)
                slices.append(Slice(name, value, rows, slice_share, deviations))
    slices.sort(key=lambda slice: -slice.deviations)
    return [slice for slice in slices if slice.deviations > 2][:_MOST_SLICES]
