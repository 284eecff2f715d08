"""toolkit/report/curves.py: what a curve keeps of its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.report.curves import charts, smoothed


@pytest.mark.parametrize("window", [2, 5, 40])
def test_smoothed_is_the_mean_around(window: int) -> None:
    values = np.random.default_rng(0).normal(size=30)
    values[[3, 17]] = np.nan
    half = window // 2
    around = [np.nanmean(values[max(0, place - half) : place + half + 1]) for place in range(30)]
    np.testing.assert_allclose(smoothed(values, window), around)


def test_rouge_has_one_chart() -> None:
    steps = [
        {"step": step, "loss": 1.0, "learning_rate": 0.1, "grad_norm": 1.0, "samples_per_second": 9.0,
         "peak_memory_bytes": 2**30}
        for step in (1, 2)
    ]  # fmt: skip
    evaluations = [
        {"step": step, "split": "validation", "loss": 2.0, "rouge1": 0.3, "rouge2": 0.1, "rougeL": 0.2}
        for step in (1, 2)
    ]
    drawn = charts(steps, evaluations, 2, 1.0, "title_generation")
    assert [chart.title for chart in drawn[:2]] == ["Loss", "ROUGE on validation"]
    assert drawn[1].legend == (("one", "ROUGE-1"), ("two", "ROUGE-2"), ("three", "ROUGE-L"))
