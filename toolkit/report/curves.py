"""The curves of report.html.

matplotlib draws them by the style sheet curves.mplstyle, and they are put into the page as SVG whose colours are the
page's, so that they follow light and dark. Names from the data are written in HTML only: fonts for them may be missing.
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

from toolkit.report.record import METRICS, Record
from toolkit.utils.extras import install_command, is_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_DOTS = 2000
# drawn colour -> the page's
_COLOURS = {
    "#00a001": "one", "#00b002": "two", "#00c003": "three", "#00f006": "four", "#00f007": "five", "#00f008": "six",
    "#00f009": "seven", "#00f00a": "eight", "#00d004": "faint", "#00e005": "line",
}  # fmt: skip
_DASHED: Any = {"color": "#00d004", "linewidth": 0.9, "linestyle": (0, (3, 3))}
# which numbers of eval.jsonl share an axis
_EVALUATION_CHARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "single_label_classification": (("accuracy", "f1_macro"),),
    "multi_label_classification": (("f1_micro", "f1_macro", "accuracy"),),
    "regression": (("pearson",), ("mae",)),
    "title_generation": (("rouge1", "rouge2", "rougeL"),),
}


@dataclass(frozen=True)
class Chart:
    """A drawing and the legend above it."""

    title: str
    svg: Markup
    legend: Sequence[tuple[str, str]] = ()
    """(colour of the page, what is drawn in it)."""
    note: str = ""


class Line(NamedTuple):
    """Values by step, NaN where there is no finite number, and how they are drawn."""

    name: str
    values: pd.Series
    kind: Literal["plain", "points", "smooth", "mean"] = "plain"
    """With a dot for each value, where they are few; as a moving average over the pale values, or without them."""


def window_of(count: int) -> int:
    """Steps that the moving average of so many values is over."""
    return max(1, count // 15)


def charts(record: Record) -> list[Chart]:
    """The curves of a run: loss, metrics, and what each step took."""
    steps, during = record.steps, record.training_evaluations
    if not steps:
        return []
    end, clip, saved = steps[-1]["step"], record.settings.get("max_grad_norm"), record.saved_step

    def of_steps(title: str, name: str, kind: Any = "smooth", unit: float = 1, **more: Any) -> Chart:
        return draw_lines(title, [Line("", values_of(steps, name) / unit, kind)], end, **more)

    def of_evaluations(names: Sequence[str]) -> Chart:
        shared = "ROUGE" if record.problem_type == "title_generation" else "Metrics"
        title = record.metric_title(names[0]) if len(names) == 1 else shared
        lines = [Line(record.metric_title(name), values_of(during, name), "points") for name in names]
        note = f"dashed: the saved model, step {saved:,}" if saved else ""
        return draw_lines(f"{title} on {during[0]['split']}", lines, end, dashed_at=saved, note=note)

    loss = [Line("training", values_of(steps, "loss"), "smooth")]
    metrics: list[tuple[str, ...]] = []
    if during:
        loss.append(Line(during[0]["split"], values_of(during, "loss"), "points"))
        others = [(name,) for name, value in during[0].items() if isinstance(value, float) and name not in METRICS]
        metrics = [
            *_EVALUATION_CHARTS.get(record.problem_type, ()),
            *others,
        ]  # a metric of this recipe alone has its own chart
    return [
        draw_lines("Loss", loss, end),
        *map(of_evaluations, metrics),
        of_steps("Learning rate", "learning_rate", "plain", from_zero=True),
        of_steps("Gradient norm", "grad_norm", note=f"before clipping at {clip:g}" if clip else ""),
        of_steps("Samples per second", "samples_per_second", from_zero=True),
        of_steps("Peak memory, GiB", "peak_memory_bytes", "plain", unit=2**30, from_zero=True),
    ]


def values_of(lines: Sequence[dict[str, Any]], name: str) -> pd.Series:
    """By step; NaN where a value is not finite."""
    # the first of a step: the last evaluation may be of the same step once more, by tuned decisions
    values = pd.Series({line["step"]: line[name] for line in reversed(lines) if name in line}, dtype=float)
    return values.where(np.isfinite(values)).sort_index()


def draw_lines(
    title: str,
    lines: Sequence[Line],
    end: int,
    from_zero: bool = False,
    dashed_at: int | None = None,
    note: str = "",
) -> Chart:
    """Lines over the steps 0 to `end`, in the page's colours one after another."""
    values = np.concatenate([line.values for line in lines])
    spike = next(filter(None, (_spike(line.values) for line in lines if line.kind == "smooth")), "")

    def draw(axes: Axes) -> None:
        for colour, line in enumerate(lines):
            _draw_line(axes, line, f"C{colour}")
        if dashed_at is not None:
            axes.axvline(dashed_at, **_DASHED)
        if np.isfinite(values).any() and (from_zero or spike):
            top = np.nanpercentile(values, 99.5) if spike else np.nanmax(values)
            axes.set_ylim(0, 1.08 * top or 1)
        axes.set_xlim(0, 1.02 * end)
        axes.locator_params(axis="x", nbins=6, integer=True)

    legend = tuple(zip(_COLOURS.values(), (line.name for line in lines), strict=False)) if len(lines) > 1 else ()
    return _chart(title, draw, 2.3, legend, ", ".join(filter(None, (note, spike))))


def _spike(values: pd.Series) -> str:
    """The note about a spike that would flatten the rest of its curve, and is drawn out of the frame."""
    if not values.max() > 2 * values.quantile(0.995):
        return ""
    return f"up to {values.max():.4g} at step {values.idxmax():,}"


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    values, window = line.values, window_of(len(line.values))
    if line.kind == "points" or len(values) == 1:
        axes.plot(values, color=colour, marker="o", clip_on=False)
    elif line.kind == "plain" or window == 1:
        axes.plot(values, color=colour)
    else:
        if line.kind == "smooth":
            axes.plot(values, color=colour, linewidth=0.8, alpha=0.35)
        mean = values.rolling(window // 2 * 2 + 1, center=True, min_periods=1).mean()
        axes.plot(mean, color=colour, linewidth=1.8)


def scatter(true: np.ndarray, predicted: np.ndarray) -> Chart | None:
    """Every sample of two (N,) at (true, predicted); many are thinned out evenly."""
    pairs = np.column_stack([true, predicted])
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if not len(pairs):
        return None
    dots, ends = pairs[:: -(-len(pairs) // _MOST_DOTS)], (pairs.min(), pairs.max())

    def draw(axes: Axes) -> None:
        axes.plot(ends, ends, **_DASHED)
        axes.plot(*dots.T, "o", color="C0", markersize=3, alpha=0.45, markeredgewidth=0, clip_on=False)
        axes.set(xlabel="true", ylabel="predicted", xlim=ends, ylim=ends)
        axes.grid(axis="x")

    thinned = f"; {len(dots):,} of {len(pairs):,} samples are drawn" if len(dots) < len(pairs) else ""
    return _chart("Predicted against true", draw, 4.2, note=f"dashed: exactly right{thinned}")


def reliability(before: dict[str, Any], after: dict[str, Any]) -> Chart:
    """Of probabilities, how many were right in each bin: [rows, mean probability, share that is right]."""
    changed = before["bins"] != after["bins"]

    def draw(axes: Axes) -> None:
        axes.axline((0, 0), slope=1, **_DASHED)
        for bins, colour in ((before["bins"], "C1"), (after["bins"], "C0"))[not changed :]:
            _, probabilities, right = zip(*bins, strict=True)
            axes.plot(probabilities, right, color=colour, linewidth=1.4, marker="o")
        axes.set(xlabel="probability", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1.02))

    legend = (("two", "before"), ("one", "after the temperature")) if changed else ()
    return _chart("Reliability", draw, 3.6, legend, "dashed: as often right as it says")


def coverage(points: Sequence[Sequence[float]], below: float | None) -> Chart:
    """Points (share answered, share of right ones among them, probability), and where a run abstains."""
    shares, right, probabilities = zip(*points, strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(shares, right, color="C0")
        if below is not None:
            answered = [share for share, chance in zip(shares, probabilities, strict=True) if chance >= below]
            axes.axvline(max(answered, default=0), **_DASHED)
        axes.set(xlabel="share of the rows that is answered", ylabel="share that is right", xlim=(0, 1.02))

    note = "" if below is None else f"dashed: no answer below {below:g}"
    return _chart("Accuracy of what is answered", draw, 3.6, note=note)


def _chart(
    title: str, draw: Callable[[Axes], None], height: float, legend: Sequence[tuple[str, str]] = (), note: str = ""
) -> Chart:
    """Draws on one pair of axes; the title is the drawing's own on the page, as its ids are made of it. Without
    matplotlib there is what to install in the drawing's place."""
    if not is_installed("matplotlib"):
        return Chart(title, Markup(""), note=install_command("report"))
    import matplotlib
    from matplotlib.figure import Figure

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}, Path(__file__).with_name("curves.mplstyle")):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.subplots()
        axes.xaxis.set_major_formatter("{x:,.7g}")
        axes.yaxis.set_major_formatter("{x:,.7g}")
        axes.locator_params(nbins=5)
        draw(axes)
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    # what may stand in HTML: no prologue, no addresses, no names that two drawings would share
    svg = re.sub(
        '^.*?<svg [^>]*(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', file.getvalue(), flags=re.DOTALL
    )
    svg = re.sub('<g id="[^"]*"', "<g", svg)
    svg = re.sub("|".join(_COLOURS), lambda drawn: f"var(--{_COLOURS[drawn[0]]})", svg)
    return Chart(title, Markup(svg), legend, note)
