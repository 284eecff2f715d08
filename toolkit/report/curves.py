"""The curves of report.html.

They are drawn by matplotlib and put into the page as SVG whose colours are the page's own, so that they
follow light and dark. Names from the data stand in HTML only: fonts for them may be missing here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from toolkit.report.record import METRICS, Record

_MOST_DOTS = 2000
# drawn colour -> the page's
_DASHED: Any = {"color": "#00d004", "linewidth": 0.9, "linestyle": (0, (3, 3))}
_COLOURS = {"#00a001": "var(--one)", "#00b002": "var(--two)", "#00c003": "var(--three)", "#00f006": "var(--four)",
            "#00f007": "var(--five)", "#00f008": "var(--six)", "#00f009": "var(--seven)", "#00f00a": "var(--eight)",
            "#00d004": "var(--faint)", "#00e005": "var(--line)"}  # fmt: skip
_ONE, _TWO, *_, _FAINT, _LINE = _COLOURS
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
    "path.simplify_threshold": 1.0,  # pixels: a curve of 200,000 steps takes 33 kB, and keeps its spikes
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


class Line(NamedTuple):
    """Values by step, NaN where there is no finite number, and how they are drawn."""

    name: str
    values: pd.Series
    kind: Literal["plain", "points", "smooth", "mean"] = "plain"
    """With a dot for each value, where they are few; as a moving average over the pale values, or without them."""


def window_of(count: int) -> int:
    """Steps that the smoothed line of so many averages over."""
    return max(1, count // 15)


def charts(record: Record) -> list[Chart]:
    """The curves of a run: loss, metrics, and what each step took."""
    steps, during = record.steps, record.during
    if not steps:
        return []
    end, clip = steps[-1]["step"], record.settings.get("max_grad_norm")
    loss = [Line("training", values_of(steps, "loss"), "smooth")]
    metrics = []
    if during:
        loss.append(Line(during[0]["split"], values_of(during, "loss"), "points"))
        metrics = [_metrics_chart(record, names, during, end) for names in _charted(record, during)]
    return [
        _chart("Loss", loss, end),
        *metrics,
        _chart("Learning rate", [Line("", values_of(steps, "learning_rate"))], end, from_zero=True),
        _chart(
            "Gradient norm",
            [Line("", values_of(steps, "grad_norm"), "smooth")],
            end,
            note=f"before clipping at {clip:g}" if clip else "",
        ),
        _chart("Samples per second", [Line("", values_of(steps, "samples_per_second"), "smooth")], end, from_zero=True),
        _chart("Peak memory, GiB", [Line("", values_of(steps, "peak_memory_bytes") / 2**30)], end, from_zero=True),
    ]


def values_of(lines: Sequence[dict[str, Any]], name: str) -> pd.Series:
    """By step; NaN where a value is not finite."""
    # the first of a step: the last evaluation may be of the same step once more, by tuned decisions
    values = pd.Series({line["step"]: line[name] for line in reversed(lines) if name in line}, dtype=float)
    return values.where(np.isfinite(values)).sort_index()


def _charted(record: Record, evaluations: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Names that share a chart; a metric that only this recipe has is alone in its own."""
    own = [(name,) for name, value in evaluations[0].items() if isinstance(value, float) and name not in METRICS]
    return [*_EVALUATION_CHARTS[record.problem_type], *own]


def _metrics_chart(record: Record, names: Sequence[str], evaluations: Sequence[dict[str, Any]], end: int) -> Chart:
    shared = "ROUGE" if record.problem_type == "title_generation" else "Metrics"
    title = record.metric_title(names[0]) if len(names) == 1 else shared
    lines = [Line(record.metric_title(name), values_of(evaluations, name), "points") for name in names]
    saved = record.saved_step
    note = f"dashed: the saved model, step {saved:,}" if saved else ""
    return _chart(f"{title} on {evaluations[0]['split']}", lines, end, dashed_at=saved, note=note)


def _chart(
    title: str,
    lines: Sequence[Line],
    end: int,
    from_zero: bool = False,
    dashed_at: int | None = None,
    note: str = "",
) -> Chart:
    """Lines over the steps 0 to `end`, in the page's colours one after another."""
    values = np.concatenate([line.values for line in lines])
    outlier = next(filter(None, (_outlier(line.values) for line in lines if line.kind == "smooth")), "")

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

    names = [colour[len("var(--") : -1] for colour in _COLOURS.values()]
    legend = tuple(zip(names, [line.name for line in lines], strict=False)) if len(lines) > 1 else ()
    return Chart(title, _svg(title, draw), legend, ", ".join(filter(None, (note, outlier))))


def overlaid(title: str, lines: Sequence[Line]) -> Chart:
    """The same curve of several runs."""
    return _chart(title, lines, max([int(line.values.index.max()) for line in lines if len(line.values)], default=1))


def _outlier(values: pd.Series) -> str:
    """What is said of a spike that would flatten the rest of its curve; it is drawn out of the frame."""
    if not values.max() > 2 * values.quantile(0.995):
        return ""
    return f"up to {values.max():.4g} at step {values.idxmax():,}"


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    values, window = line.values, window_of(len(line.values))
    if line.kind == "points" or len(values) == 1:
        axes.plot(values, color=colour, linewidth=1.6, marker="o", markersize=3.5, clip_on=False)
    elif line.kind == "plain" or window == 1:
        axes.plot(values, color=colour, linewidth=1.6)
    else:
        mean = values.rolling(window // 2 * 2 + 1, center=True, min_periods=1).mean()
        if line.kind == "smooth":
            axes.plot(values, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(mean, color=colour, linewidth=1.8)


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


def reliability(before: dict[str, Any], after: dict[str, Any]) -> Chart:
    """Of probabilities, how many were right in each bin: [rows, mean probability, share that is right]."""
    changed = before["bins"] != after["bins"]
    shown = [(before, _TWO), (after, _ONE)] if changed else [(after, _ONE)]

    def draw(axes: Axes) -> None:
        axes.plot((0, 1), (0, 1), **_DASHED)
        for found, colour in shown:
            sure, right = zip(*((sure, right) for _, sure, right in found["bins"]), strict=True)
            axes.plot(sure, right, color=colour, linewidth=1.4, marker="o", markersize=3.5)
        axes.set(xlabel="probability", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1.02))

    legend = (("two", "before"), ("one", "after the temperature")) if changed else ()
    return Chart("Reliability", _svg("reliability", draw, (5.2, 3.6)), legend, "dashed: as often right as it says")


def coverage(points: Sequence[Sequence[float]], below: float | None) -> Chart:
    """Points (share answered, share of right ones among them, probability), and where a run abstains."""

    def draw(axes: Axes) -> None:
        axes.plot([point[0] for point in points], [point[1] for point in points], color=_ONE, linewidth=1.6)
        if below is not None:
            axes.axvline(max((share for share, _, chance in points if chance >= below), default=0), **_DASHED)
        axes.set(xlabel="share of the rows that is answered", ylabel="share that is right", xlim=(0, 1.02))

    note = "" if below is None else f"dashed: no answer below {below:g}"
    return Chart("Accuracy of what is answered", _svg("coverage", draw, (5.2, 3.6)), (), note)


def _svg(name: str, draw: Callable[[Axes], None], size: tuple[float, float] = (5.2, 2.3)) -> Markup:
    """Draws on one pair of axes -> an <svg> element, colours and fonts those of the page.

    `name` is the drawing's own on the page: the ids inside it are made of it.
    """
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
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
