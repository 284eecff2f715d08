"""The charts of report.html: matplotlib draws them with curves.mplstyle, as inline SVG.

The page restyles their colours for dark mode and print. Names from the data appear in HTML only, as
matplotlib may have no font for them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from toolkit.report.record import Record, results
from toolkit.utils.extras import install_command, is_installed

_FEW = 50  # values of a line, which are then drawn as dots


@dataclass(frozen=True)
class Chart:
    """A chart of a page, which writes its title and legend in HTML."""

    title: str
    svg: Markup
    legend: Sequence[str] = ()
    """The names of its lines, which have the colours c1, c2, ... of the page."""
    note: str = ""


def charts(record: Record) -> list[Chart]:
    """The curves of a run: loss, metrics, learning rate, gradient norm, speed and memory."""
    steps, evaluations = record.steps, record.training_evaluations
    if not steps:
        return []
    losses = {"train": values_of(steps, "loss")}
    drawn = []
    if evaluations:
        split = evaluations[0]["split"]
        losses[split] = values_of(evaluations, "loss")
        for name in results(evaluations[0]):
            if name != "loss":
                values = values_of(evaluations, name)
                drawn.append(draw_lines(f"{name} ({split})", {"": values}))
    of_steps = {
        "Learning rate": values_of(steps, "learning_rate"),
        "Gradient norm, before clipping": values_of(steps, "grad_norm"),
        "Samples per second": values_of(steps, "samples_per_second"),
        "Peak memory, GiB": values_of(steps, "peak_memory_bytes") / 2**30,
    }
    for title, values in of_steps.items():
        drawn.append(draw_lines(title, {"": values}))
    return [draw_lines("Loss", losses), *drawn]


def values_of(lines: Sequence[dict[str, Any]], name: str) -> pd.Series:
    """Values by step, NaN if not finite."""
    # the first line of a step: the last step may be evaluated again with tuned decisions
    values = {line["step"]: line[name] for line in reversed(lines) if name in line}
    return pd.Series(values, dtype=float).sort_index()


def draw_lines(title: str, lines: Mapping[str, pd.Series]) -> Chart:
    """Draws name -> values by step, in the page's eight colours: dots, or of many values a moving
    average over pale ones. Without matplotlib the chart's note says what to install."""
    if not is_installed("matplotlib"):
        return Chart(title, Markup(""), note=install_command("report"))
    import matplotlib
    from matplotlib.figure import Figure

    style = Path(__file__).with_name("curves.mplstyle")
    # ids of the SVG derived from the title: the same run gives the same page
    with matplotlib.rc_context({"svg.hashsalt": title}, style):
        figure = Figure(figsize=(5.2, 2.3), layout="constrained")
        axes = figure.subplots()
        for values in lines.values():
            _draw_line(axes, values)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6, integer=True)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
    svg = file.getvalue()
    return Chart(title, Markup(svg[svg.index("<svg") :]), list(lines))


def _draw_line(axes: Any, values: pd.Series) -> None:
    """In the next colour of the style sheet."""
    if len(values) <= _FEW:
        axes.plot(values, marker="o")
        return
    (pale,) = axes.plot(values, linewidth=0.8, alpha=0.35)
    mean = values.rolling(len(values) // 15, center=True, min_periods=1).mean()
    axes.plot(mean, color=pale.get_color())
