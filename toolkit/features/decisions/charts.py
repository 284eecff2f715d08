"""Charts of tuned decisions on the report page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.report.curves import DASHED, Chart, chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def reliability(before: dict[str, Any], after: dict[str, Any]) -> Chart:
    """Accuracy by probability, from `bins` of [rows, mean probability, accuracy]."""
    changed = before["bins"] != after["bins"]

    def draw(axes: Axes) -> None:
        axes.axline((0, 0), slope=1, **DASHED)
        for bins, colour in ((before["bins"], "C1"), (after["bins"], "C0"))[not changed :]:
            _, probabilities, accuracies = zip(*bins, strict=True)
            axes.plot(probabilities, accuracies, color=colour, linewidth=1.4, marker="o")
        axes.set(xlabel="probability", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))

    legend = (("two", "before"), ("one", "after the temperature")) if changed else ()
    return chart("Reliability", draw, 3.6, legend, "dashed: perfectly calibrated")


def coverage(points: Sequence[Sequence[float]], below: float | None) -> Chart:
    """Points (share of rows answered, accuracy among them, lowest probability), and `--abstain_below`."""
    shares, accuracies, probabilities = zip(*points, strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(shares, accuracies, color="C0")
        if below is not None:
            answered = [share for share, chance in zip(shares, probabilities, strict=True) if chance >= below]
            axes.axvline(max(answered, default=0), **DASHED)
        axes.set(xlabel="share of rows answered", ylabel="accuracy", xlim=(0, 1.02))

    note = "" if below is None else f"dashed: no answer below {below:g}"
    return chart("Accuracy of the answered rows", draw, 3.6, note=note)
