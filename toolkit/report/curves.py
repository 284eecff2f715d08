"""The charts of report.html: matplotlib draws them with curves.mplstyle, as inline SVG.

The page restyles its colours for dark mode and print. Names from the data appear in HTML only, as
matplotlib may have no font for them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from markupsafe import Markup

from toolkit.report.files import METRICS, Record
from toolkit.utils.extras import install_command, is_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_DOTS = 2000
# CSS variables of the colours C0 to C7 of curves.mplstyle
COLOURS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
DASHED: Any = {"color": "#747c86", "linewidth": 0.9, "linestyle": (0, (3, 3))}
# metrics that share a chart
_EVALUATION_CHARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "single_label_classification": (("accuracy", "f1_macro"),),
    "multi_label_classification": (("f1_micro", "f1_macro", "accuracy"),),
    "regression": (("pearson",), ("mae",)),
    "title_generation": (("rouge1", "rouge2", "rougeL"),),
}


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
    kind: Literal["plain", "points", "smooth", "mean"] = "plain"
    """`points`: a dot for each value; `smooth`: a moving average over pale values; `mean`: the
    average alone."""


def charts(record: Record) -> list[Chart]:
    """The curves of a run: loss, metrics, learning rate, gradient norm, speed and memory."""
    steps, evaluations = record.steps, record.training_evaluations
    if not steps:
        return []
    end = steps[-1]["step"]
    clip = record.settings.get("max_grad_norm")
    saved = record.saved_step

    def draw_steps(
        title: str, name: str, kind: Any = "smooth", unit: float = 1, note: str = ""
    ) -> Chart:
        return draw_lines(
            title, [Line("", values_of(steps, name) / unit, kind)], end, note, from_zero=True
        )

    def draw_metrics(names: Sequence[str]) -> Chart:
        group = "ROUGE" if record.problem_type == "title_generation" else "Metrics"
        title = record.metric_title(names[0]) if len(names) == 1 else group
        lines = [
            Line(record.metric_title(name), values_of(evaluations, name), "points")
            for name in names
        ]
        note = f"dashed: the saved model, step {saved:,}" if saved else ""
        return draw_lines(
            f"{title} on {evaluations[0]['split']}", lines, end, note, dashed_at=saved
        )

    loss = [Line("training", values_of(steps, "loss"), "smooth")]
    metrics: list[tuple[str, ...]] = []
    if evaluations:
        first = evaluations[0]
        loss.append(Line(first["split"], values_of(evaluations, "loss"), "points"))
        custom = [
            (name,)
            for name, value in first.items()
            if isinstance(value, float) and name not in METRICS
        ]
        metrics = [*_EVALUATION_CHARTS.get(record.problem_type, ()), *custom]
    return [
        draw_lines("Loss", loss, end),
        *map(draw_metrics, metrics),
        draw_steps("Learning rate", "learning_rate", "plain"),
        draw_steps(
            "Gradient norm", "grad_norm", note=f"before clipping at {clip:g}" if clip else ""
        ),
        draw_steps("Samples per second", "samples_per_second"),
        draw_steps("Peak memory, GiB", "peak_memory_bytes", "plain", unit=2**30),
    ]


def values_of(lines: Sequence[dict[str, Any]], name: str) -> pd.Series:
    """Values by step, NaN if not finite."""
    # the first line of a step: the last step may be evaluated again with tuned decisions
    values = pd.Series(
        {line["step"]: line[name] for line in reversed(lines) if name in line}, dtype=float
    )
    return values.where(np.isfinite(values)).sort_index()


def draw_lines(
    title: str,
    lines: Sequence[Line],
    end: int,
    note: str = "",
    from_zero: bool = False,
    dashed_at: int | None = None,
) -> Chart:
    """Lines over the steps 0 to `end`, each in the next colour of the page, at most eight. A spike
    of a smooth line is cut off, so that it does not flatten the rest of the curve, and noted."""
    values = pd.concat(
        [line.values for line in lines if line.kind == "smooth"] or [pd.Series(dtype=float)]
    )
    most = values.quantile(0.995)
    has_spike = values.max() > 2 * most > 0

    def draw(axes: Axes) -> None:
        for colour, line in enumerate(lines):
            _draw_line(axes, line, f"C{colour}")
        if dashed_at is not None:
            axes.axvline(dashed_at, **DASHED)
        if from_zero or has_spike:
            axes.set_ylim(0, 1.08 * most if has_spike else None)
        axes.set_xlim(0, 1.02 * end)
        axes.locator_params(axis="x", nbins=6, integer=True)

    legend: Sequence[tuple[str, str]] = ()
    if len(lines) > 1:
        legend = tuple((COLOURS[place], line.name) for place, line in enumerate(lines))
    spike = f"up to {values.max():.4g} at step {values.idxmax():,}" if has_spike else ""
    return chart(title, draw, 2.3, legend, ", ".join(filter(None, (note, spike))))


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    values = line.values
    dots: Any = {}
    if line.kind == "points" or len(values) == 1:
        dots = {"marker": "o", "clip_on": False}
    if line.kind == "smooth":
        axes.plot(values, color=colour, linewidth=0.8, alpha=0.35)
    if line.kind in ("smooth", "mean"):
        values = values.rolling(max(1, len(values) // 15), center=True, min_periods=1).mean()
    axes.plot(values, color=colour, **dots)


def scatter(true: np.ndarray, predicted: np.ndarray) -> Chart | None:
    """Two (N,) arrays as dots at (true, predicted), of which at most `_MAX_DOTS` are drawn."""
    pairs = np.column_stack([true, predicted])
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if not len(pairs):
        return None
    dots = pairs[:: -(-len(pairs) // _MAX_DOTS)]
    ends = (pairs.min(), pairs.max())

    def draw(axes: Axes) -> None:
        axes.plot(ends, ends, **DASHED)
        axes.plot(
            *dots.T, "o", color="C0", markersize=3, alpha=0.45, markeredgewidth=0, clip_on=False
        )
        axes.set(xlabel="true", ylabel="predicted", xlim=ends, ylim=ends)
        axes.grid(axis="x")

    note = "dashed: exactly right"
    if len(dots) < len(pairs):
        note += f"; {len(dots):,} of {len(pairs):,} samples are drawn"
    return chart("Predicted against true", draw, 4.2, note=note)


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
    with matplotlib.rc_context(
        {"svg.hashsalt": title}, Path(__file__).with_name("curves.mplstyle")
    ):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.subplots()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.7g}")
        axes.locator_params(nbins=5)
        draw(axes)
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    # strip what must not be in the page: the XML prologue, URLs, and ids that two drawings would
    # share
    svg = re.sub(
        '(?s)^.*?<svg [^>]*(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', file.getvalue()
    )
    svg = re.sub('<g id="[^"]*"', "<g", svg)
    return Chart(title, Markup(svg), legend, note)
