"""The curves of report.html.

They are drawn by matplotlib and put into the page as SVG whose colours are the page's own, so that they
follow light and dark. Names from the data stand in HTML only: fonts for them may be missing here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from toolkit.config import Task
from toolkit.report.card import METRICS, metric_title
from toolkit.report.files import by_step

_MOST_POINTS = 600  # of a curve: more make the page heavy and look the same
_MOST_DOTS = 2000

# drawn colour -> the page's
_DASHED: Any = {"color": "#00d004", "linewidth": 0.9, "linestyle": (0, (3, 3))}
_COLOURS = {"#00a001": "var(--one)", "#00b002": "var(--two)", "#00c003": "var(--three)", "#00d004": "var(--faint)",
            "#00e005": "var(--line)"}  # fmt: skip
_ONE, _TWO, _THREE, _FAINT, _LINE = _COLOURS
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _FAINT,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.labelcolor": _FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.formatter.useoffset": False,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
}
# which numbers of eval.jsonl share an axis
_EVALUATION_CHARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "single_label_classification": (("accuracy", "f1_macro"),),
    "multi_label_classification": (("f1_micro", "f1_macro", "accuracy"),),
    "regression": (("pearson",), ("mae",)),
    "title_generation": (("rouge1", "rouge2", "rougeL"),),
}


@dataclass(frozen=True)
class Chart:
    """A drawing and the legend that stands over it."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    """(one, two, three or faint, what that colour is)."""
    note: str = ""


@dataclass(frozen=True)
class Series:
    """What was recorded under one name; NaN where it was not a finite number."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def window(self) -> int:
        """Steps that the smoothed line averages over."""
        return max(1, len(self.steps) // 15)


@dataclass(frozen=True)
class Line:
    """A series and how it is drawn."""

    name: str
    series: Series
    points: bool = False
    """A dot for each value: they are few."""
    smooth: bool = False
    """A strong moving average over the pale values."""


def series_of(lines: Sequence[dict[str, Any]], name: str, factor: float = 1.0) -> Series:
    """What the lines hold under `name`, times `factor`; lines without it are passed over."""
    pairs = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    array = np.array(pairs, np.float64).reshape(-1, 2)
    return Series(array[:, 0], np.where(np.isfinite(array[:, 1]), factor * array[:, 1], np.nan))


def charts(
    steps: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
    saved_step: int | None,
    max_grad_norm: float | None,
    problem_type: Task,
) -> list[Chart]:
    """The curves of a run: loss, metrics, and what each step took.

    `steps` and `evaluations` are the lines of metrics.jsonl (each step once) and of eval.jsonl, without
    comparisons.
    """
    if not steps:
        return []
    end = steps[-1]["step"]
    clipping = f"before clipping at {max_grad_norm:g}" if max_grad_norm else ""
    each_step = [
        _chart("Learning rate", [Line("", series_of(steps, "learning_rate"))], end, from_zero=True),
        _chart("Gradient norm", [Line("", series_of(steps, "grad_norm"), smooth=True)], end, note=clipping),
        _chart("Samples per second", [Line("", series_of(steps, "samples_per_second"), smooth=True)], end, True),
        _chart("Peak memory, GiB", [Line("", series_of(steps, "peak_memory_bytes", 2**-30))], end, from_zero=True),
    ]
    loss = Line("training", series_of(steps, "loss"), smooth=True)
    if not evaluations:
        return [_chart("Loss", [loss], end), *each_step]
    split = evaluations[0]["split"]
    during = by_step(line for line in evaluations if line["split"] == split)
    metrics = [
        _chart(
            f"{_shared_title(names, problem_type)} on {split}",
            [Line(metric_title(name, problem_type), series_of(during, name), points=True) for name in names],
            end,
            dashed_at=saved_step,
            note=f"dashed: the saved model, step {saved_step:,}" if saved_step else "",
        )
        for names in [*_EVALUATION_CHARTS[problem_type], *_own_metrics(during)]
    ]
    return [_chart("Loss", [loss, Line(split, series_of(during, "loss"), points=True)], end), *metrics, *each_step]


def _own_metrics(evaluations: Sequence[dict[str, Any]]) -> list[tuple[str]]:
    """Metrics that only this recipe has: a chart each."""
    first = evaluations[0] if evaluations else {}
    return [(name,) for name, value in first.items() if isinstance(value, float) and name not in METRICS]


def _shared_title(names: Sequence[str], problem_type: Task) -> str:
    if len(names) == 1:
        return metric_title(names[0], problem_type)
    return "ROUGE" if problem_type == "title_generation" else "Metrics"


def _chart(
    title: str,
    lines: Sequence[Line],
    end: int,
    from_zero: bool = False,
    dashed_at: int | None = None,
    note: str = "",
) -> Chart:
    """Lines over the steps 0 to `end`, in the page's colours one after another."""

    values = np.concatenate([line.series.values for line in lines])
    outlier = max((_outlier(line.series) for line in lines if line.smooth), default="")

    def draw(axes: Axes) -> None:
        for line, colour in zip(lines, _COLOURS, strict=False):
            _draw_line(axes, line, colour)
        if dashed_at is not None:
            axes.axvline(dashed_at, **_DASHED)
        if np.isfinite(values).any() and (from_zero or outlier):
            top = np.nanpercentile(values, 99.5) if outlier else np.nanmax(values)
            axes.set_ylim(0, 1.08 * top or 1)
        axes.set_xlim(0, 1.02 * end)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))

    legend = tuple(zip(("one", "two", "three"), [line.name for line in lines], strict=False)) if len(lines) > 1 else ()
    return Chart(title, _svg(title, draw), legend, ", ".join(filter(None, (note, outlier))))


def _outlier(series: Series) -> str:
    """What is said of a spike that would flatten the rest of its curve; it is drawn out of the frame."""
    if not np.isfinite(series.values).any():
        return ""
    greatest = int(np.nanargmax(series.values))
    if series.values[greatest] <= 2 * np.nanpercentile(series.values, 99.5):
        return ""
    return f"up to {series.values[greatest]:.4g} at step {int(series.steps[greatest]):,}"


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    raw, window = _thinned(line.series), line.series.window
    if line.points or len(raw.steps) == 1:
        axes.plot(raw.steps, raw.values, color=colour, linewidth=1.6, marker="o", markersize=3.5, clip_on=False)
    elif not line.smooth or window == 1:
        axes.plot(raw.steps, raw.values, color=colour, linewidth=1.6)
    else:
        axes.plot(raw.steps, raw.values, color=colour, linewidth=0.8, alpha=0.35)
        mean = _thinned(Series(line.series.steps, smoothed(line.series.values, window)))
        axes.plot(mean.steps, mean.values, color=colour, linewidth=1.8)


def scatter(samples: Sequence[tuple[float, float]]) -> Chart | None:
    """Every sample at (true, predicted); many are thinned out evenly."""
    pairs = np.array(samples, np.float64).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if not len(pairs):
        return None
    chosen = pairs[np.linspace(0, len(pairs) - 1, min(len(pairs), _MOST_DOTS)).astype(int)]

    def draw(axes: Axes) -> None:
        edge = 0.04 * (pairs.max() - pairs.min()) or 1.0
        ends = (pairs.min() - edge, pairs.max() + edge)
        axes.plot(ends, ends, **_DASHED)
        axes.plot(chosen[:, 0], chosen[:, 1], "o", color=_ONE, markersize=3, alpha=0.45, markeredgewidth=0)
        axes.set(xlabel="true", ylabel="predicted", xlim=ends, ylim=ends)
        axes.grid(axis="x")

    thinned = f"; {len(chosen):,} of {len(pairs):,} samples are drawn" if len(chosen) < len(pairs) else ""
    return Chart("Predicted against true", _svg("scatter", draw, (5.2, 4.2)), (), f"dashed: exactly right{thinned}")


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """(N,) -> (N,), the mean of the finite values among the `window` around each; shorter at the ends."""
    finite = np.isfinite(values)
    places = np.arange(len(values))
    first, last = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    totals = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    count = counts[last] - counts[first]
    return np.divide(totals[last] - totals[first], count, out=np.full(len(values), np.nan), where=count > 0)


def _thinned(series: Series) -> Series:
    """Least and greatest of each stretch, so that a spike stays to be seen."""
    if len(series.steps) <= _MOST_POINTS:
        return series
    stretches = np.array_split(np.arange(len(series.steps)), _MOST_POINTS // 2)
    known = np.nan_to_num(series.values)
    kept = sorted({int(part[pick(known[part])]) for part in stretches for pick in (np.argmin, np.argmax)})
    return Series(series.steps[kept], series.values[kept])


def _svg(name: str, draw: Callable[[Axes], None], size: tuple[float, float] = (5.2, 2.3)) -> Markup:
    """Draws on one pair of axes -> an <svg> element, colours and fonts those of the page.

    `name` is the drawing's own on the page: the ids inside it are made of it.
    """
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        written = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return Markup(_inlined(written.getvalue()))


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}".replace("e-0", "e-")


def _inlined(svg: str) -> str:
    """An SVG file -> what may stand in HTML: no prologue, no addresses, no names two drawings would share."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r" font-family: [^;]*;", "", svg)  # the page's own
    for drawn, own in _COLOURS.items():
        svg = svg.replace(drawn, own)
    return svg
