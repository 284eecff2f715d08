"""toolkit/report/curves.py: what a curve keeps of its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.report import curves
from toolkit.report.curves import Series, smoothed


@pytest.mark.parametrize("window", [2, 5, 40])
def test_smoothed_is_the_mean_around(window: int) -> None:
    values = np.random.default_rng(0).normal(size=30)
    values[[3, 17]] = np.nan
    half = window // 2
    around = [np.nanmean(values[max(0, place - half) : place + half + 1]) for place in range(30)]
    np.testing.assert_allclose(smoothed(values, window), around)


def test_a_spike_stays_in_a_long_curve() -> None:
    series = Series(np.arange(50_000.0), np.zeros(50_000))
    series.values[31_337] = 9.0
    kept = curves._thinned(series)
    assert len(kept.steps) <= 600
    assert kept.steps[kept.values.argmax()] == 31_337
    assert curves._outlier(series) == "up to 9 at step 31,337"
