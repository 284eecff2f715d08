"""toolkit/report/curves.py: what a curve keeps of its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.report.curves import smoothed


@pytest.mark.parametrize("window", [2, 5, 40])
def test_smoothed_is_the_mean_around(window: int) -> None:
    values = np.random.default_rng(0).normal(size=30)
    values[[3, 17]] = np.nan
    half = window // 2
    around = [np.nanmean(values[max(0, place - half) : place + half + 1]) for place in range(30)]
    np.testing.assert_allclose(smoothed(values, window), around)
