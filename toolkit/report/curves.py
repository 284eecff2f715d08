"""The charts of report.html: matplotlib draws them with curves.mplstyle, as inline SVG.

The page restyles their colours for dark mode and print. Names from the data appear in HTML only, as
matplotlib may have no font for them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from markupsafe import Markup

from toolkit.evaluation.outputs import drop_redundant_f1
from toolkit.report.record import Record, metric_title
from toolkit.utils.extras import install_command, is_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS = 50  # of a line, which are then marked
_MAX_DOTS = 2000
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


class Line(NamedTuple):
    name: str
    values: pd.Series
    """Values by step, NaN if not finite."""
    smooth: bool = False
    """Whether to draw a moving average over pale values."""


def charts(record: Record) -> list[Chart]:
    """The curves of a run: loss, metrics, learning rate, gradient norm, speed and memory."""
    steps, evaluations = record.steps, record.training_evaluations
    if not steps:
        return []
    loss = [Line("training", values_of(steps, "loss"), smooth=True)]
    metrics = []
    if evaluations:
        split = evaluations[0]["split"]
        loss.append(Line(split, values_of(evaluations, "loss")))
        for name, value in drop_redundant_f1(evaluations[0]).items():
            if isinstance(value, float) and name != "loss":
                line = Line("", values_of(evaluations, name))
                metrics.append(draw_lines(f"{metric_title(name)} on {split}", [line]))
    norms = Line("", values_of(steps, "grad_norm"), smooth=True)
    speeds = Line("", values_of(steps, "samples_per_second"), smooth=True)
    return [
        draw_lines("Loss", loss),
        *metrics,
        draw_lines("Learning rate", [Line("", values_of(steps, "learning_rate"))]),
        draw_lines("Gradient norm, before clipping", [norms]),
        draw_lines("Samples per second", [speeds]),
        draw_lines("Peak memory, GiB", [Line("", values_of(steps, "peak_memory_bytes") / 2**30)]),
    ]


def values_of(lines: Sequence[dict[str, Any]], name: str) -> pd.Series:
    """Values by step, NaN if not finite."""
    # the first line of a step: the last step may be evaluated again with tuned decisions
    values = {line["step"]: line[name] for line in reversed(lines) if name in line}
    return pd.Series(values, dtype=float).sort_index()


def draw_lines(title: str, lines: Sequence[Line]) -> Chart:
    """Lines over the steps, each in the next colour of the page, at most eight."""

    def draw(axes: Axes) -> None:
        for place, line in enumerate(lines):
            values, colour = line.values, f"C{place}"
            if line.smooth:
                axes.plot(values, color=colour, linewidth=0.8, alpha=0.35)
                window = max(1, len(values) // 15)
                values = values.rolling(window, center=True, min_periods=1).mean()
            marker = "o" if len(values) <= _MAX_POINTS else ""
            axes.plot(values, color=colour, marker=marker)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6, integer=True)

    legend: list[tuple[str, str]] = []
    if len(lines) > 1:
        legend = [(COLOURS[place], line.name) for place, line in enumerate(lines)]
    return chart(title, draw, 2.3, legend)


def scatter(true: np.ndarray, predicted: np.ndarray) -> Chart:
    """Two (N,) arrays as dots at (true, predicted), of which at most `_MAX_DOTS` are drawn."""
    every = -(-len(true) // _MAX_DOTS)

    def draw(axes: Axes) -> None:
        dots = {"marker": "o", "markersize": 3, "alpha": 0.45, "markeredgewidth": 0}
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
