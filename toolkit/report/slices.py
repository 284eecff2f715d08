"""Groups of rows (slices) with significantly more errors than average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

MIN_ROWS = 10
_MAX_SLICES = 15


class Slice(NamedTuple):
    """The rows that have one value in a column."""

    name: str
    value: str
    rows: int
    wrong: float
    """Error rate, 0 to 1."""
    deviations: float
    """Standard deviations (binomial) above the error rate of all rows."""


def worst_slices(wrong: np.ndarray, groups: Mapping[str, Sequence[str]]) -> list[Slice]:
    """The slices whose error rate is more than two standard deviations above that of all rows, the worst first.
    `wrong`: (N,) bool; `groups`: column -> each row's value."""
    share, slices = float(wrong.mean()) if len(wrong) else 0.0, []
    for name, values in groups.items() if 0 < share < 1 else ():
        for value, rows, slice_share in pd.Series(wrong).groupby(list(values)).agg(["size", "mean"]).itertuples():
            if MIN_ROWS <= rows < len(wrong):
                deviations = (slice_share - share) / math.sqrt(share * (1 - share) / rows)
                slices.append(Slice(name, value, rows, slice_share, deviations))
    slices.sort(key=lambda slice: -slice.deviations)
    return [slice for slice in slices if slice.deviations > 2][:_MAX_SLICES]
