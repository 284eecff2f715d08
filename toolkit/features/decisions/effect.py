"""Whether probabilities are right as often as they say, and the chart of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.report.curves import DASHED, Chart, chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 15


def calibration_error(probabilities: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """`ece`, `brier`, and `bins` of a reliability diagram: [rows, mean probability, share correct].

    `probabilities` (N, C); `truth` (N,) classes, or (N, C) labels. With one label per row the
    expected calibration error is that of the most probable class (Guo et al., 2017; bins of equal
    width), and Brier's score (1950) a sum over classes; with several, both count each label.
    """
    if truth.ndim == 2:
        confidence = probabilities.ravel()
        correct = truth.ravel()
        brier = np.mean((probabilities - truth) ** 2)
    else:
        confidence = probabilities.max(axis=1)
        correct = probabilities.argmax(axis=1) == truth
        target = np.eye(probabilities.shape[1])[truth]  # (N, C)
        brier = np.mean(((probabilities - target) ** 2).sum(axis=1))
    bin_of = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    count = np.bincount(bin_of, minlength=_BINS)
    total = np.bincount(bin_of, confidence, _BINS)
    hits = np.bincount(bin_of, correct, _BINS)
    filled = np.flatnonzero(count)
    means = zip(count[filled], total[filled], hits[filled], strict=True)
    ece = np.abs(total - hits).sum() / len(confidence)
    bins = [[int(rows), float(sum_ / rows), float(right / rows)] for rows, sum_, right in means]
    return {"ece": float(ece), "brier": float(brier), "bins": bins}


def reliability_chart(effect: Mapping[str, Any]) -> Chart:
    """Accuracy by probability, before and after the temperature."""
    before, after = effect["before"]["bins"], effect["after"]["bins"]
    lines = [(after, "C0")]
    legend: tuple[tuple[str, str], ...] = ()
    if before != after:
        lines = [(before, "C1"), (after, "C0")]
        legend = (("two", "before"), ("one", "after the temperature"))

    def draw(axes: Axes) -> None:
        axes.axline((0, 0), slope=1, **DASHED)
        for bins, colour in lines:
            _, probabilities, accuracies = zip(*bins, strict=True)
            axes.plot(probabilities, accuracies, color=colour, linewidth=1.4, marker="o")
        axes.set(xlabel="probability", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))

    return chart("Reliability", draw, 3.6, legend, "dashed: perfectly calibrated")
