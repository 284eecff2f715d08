"""The charts of report.html: matplotlib draws them with curves.mplstyle, as inline SVG.

The page restyles their colours for dark mode and print. Names from the data appear in HTML only, as
matplotlib may have no font for them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from toolkit.evaluation.outputs import drop_redundant_f1
from toolkit.report.record import Record, metric_title
from toolkit.utils.extras import install_command, is_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW = 50  # values of a line, which are then drawn as dots
_MAX_DOTS = 2000
_STEP_CHARTS = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "samples_per_second": "Samples per second",
}
# CSS variables of the colours C0 to C7 of curves.mplstyle
COLOURS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
DASHED: Any = {"color": "#747c86", "linewidth": 0.9, "linestyle": (0, (3, 3))}


@dataclass(frozen=True)
class Chart:
    title: str
    svg: Markup
    legend: Sequence[tuple[str, str]] = ()
    """(CSS variable, name) of each line."""
    note: str = ""


def charts(record: Record) -> list[Chart]:
    """The curves of a run: loss, metrics, learning rate, gradient norm, speed and memory."""
    steps, evaluations = record.steps, record.training_evaluations
    if not steps:
        return []
    loss = {"training": values_of(steps, "loss")}
    others = {}
    if evaluations:
        split = evaluations[0]["split"]
        loss[split] = values_of(evaluations, "loss")
        for name, value in drop_redundant_f1(evaluations[0]).items():
            if isinstance(value, float) and name != "loss":
                others[f"{metric_title(name)} on {split}"] = values_of(evaluations, name)
    for name, title in _STEP_CHARTS.items():
        others[title] = values_of(steps, name)
    others["Peak memory, GiB"] = values_of(steps, "peak_memory_bytes") / 2**30
    drawn = [draw_lines(title, {"": values}) for title, values in others.items()]
    return [draw_lines("Loss", loss), *drawn]


def values_of(lines: Sequence[dict[str, Any]], name: str) -> pd.Series:
    """Values by step, NaN if not finite."""
    # the first line of a step: the last step may be evaluated again with tuned decisions
    values = {line["step"]: line[name] for line in reversed(lines) if name in line}
    return pd.Series(values, dtype=float).sort_index()


def draw_lines(title: str, lines: Mapping[str, pd.Series]) -> Chart:
    """Name -> values by step: dots, or of many values a moving average over pale ones. Each line
    has the next colour of the page, of which there are eight."""

    def draw(axes: Axes) -> None:
        for place, values in enumerate(lines.values()):
            colour, marker = f"C{place}", "o"
            if len(values) > _FEW:
                axes.plot(values, color=colour, linewidth=0.8, alpha=0.35)
                window = len(values) // 15
                values = values.rolling(window, center=True, min_periods=1).mean()
                marker = ""
            axes.plot(values, color=colour, marker=marker)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6, integer=True)

    legend: list[tuple[str, str]] = []
    if len(lines) > 1:
        legend = list(zip(COLOURS, lines, strict=False))
    return chart(title, draw, 2.3, legend)


def scatter(true: np.ndarray, predicted: np.ndarray) -> Chart:
    """Two (N,) arrays as dots at (true, predicted), of which at most `_MAX_DOTS` are drawn."""
    every = -(-len(true) // _MAX_DOTS)

    def draw(axes: Axes) -> None:
        dots: Any = {"marker": "o", "markersize": 3, "alpha": 0.45, "markeredgewidth": 0}
        axes.plot(true[::every], predicted[::every], color="C0", linestyle="", **dots)
        axes.axline((true[0], true[0]), slope=1, **DASHED)
        axes.set(xlabel="true", ylabel="predicted")

    return chart("Predicted against true", draw, 4.2, note="dashed: exactly right")


def chart(
    title: str,
    draw: Callable[[Axes], None],
    height: float,
    legend: Sequence[tuple[str, str]] = (),
    note: str = "",
) -> Chart:
    """Draws one chart as SVG, with ids derived from its title; without matplotlib the note says
    what to install."""
    if not is_installed("matplotlib"):
        return Chart(title, Markup(""), note=install_command("report"))
    import matplotlib
    from matplotlib.figure import Figure

    file = io.StringIO()
    style = Path(__file__).with_name("curves.mplstyle")
    with matplotlib.rc_context({"svg.hashsalt": title}, style):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.subplots()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.7g}")
        axes.locator_params(nbins=5)
        draw(axes)
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = file.getvalue()
    return Chart(title, Markup(svg[svg.index("<svg") :]), legend, note)
