"""`toolkit compare RUN...`: a table of runs in the terminal, and a page with their curves."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from toolkit.report import curves
from toolkit.report.comparison import (
    LOSS_SETTINGS,
    TRAINING_LOSS_SETTINGS,
    ComparedRun,
    as_text,
    compare,
    tables,
    verdicts,
)
from toolkit.report.files import dumps, latest_per_step, write_atomically
from toolkit.report.record import render

_MAX_CURVES = 8


def run(options: Any) -> None:
    """`toolkit compare`."""
    comparison, runs = compare(options.runs)
    if options.output:
        write_page(Path(options.output), comparison, runs)
    if options.json:
        print(dumps(comparison, indent=2))
        return
    print(as_text(comparison))
    print(f"\n{options.output}" if options.output else "\n--output compare.html draws their curves")


def write_page(path: Path, comparison: dict[str, Any], runs: Sequence[ComparedRun]) -> None:
    context = {"comparison": comparison, "tables": tables(comparison), "verdicts": verdicts(comparison),
               "charts": charts(comparison, runs), "num_without_curves": len(runs) - _MAX_CURVES}  # fmt: skip
    write_atomically(path, [render(Path(__file__).with_name("compare.html"), context)])


def charts(comparison: dict[str, Any], runs: Sequence[ComparedRun]) -> list[curves.Chart]:
    """The curves of the best runs; runs with different losses get separate charts."""
    metric, drawn = comparison["metric"], []
    overlays: list[tuple[str, Any, str, Collection[str]]] = [  # "mean": over steps, "points": evaluations
        ("Training loss, a moving average", "mean", "loss", TRAINING_LOSS_SETTINGS),
        ("Validation loss", "points", "loss", LOSS_SETTINGS),
        (f"{runs[0].record.metric_title(metric)} on validation", "points", metric, ()),
        ("Samples per second", "mean", "samples_per_second", ()),
    ]
    for title, kind, name, loss_settings in overlays:
        groups: dict[str, list[curves.Line]] = collections.defaultdict(list)
        for run in runs[:_MAX_CURVES]:
            values = curves.values_of(
                run.record.steps if kind == "mean" else latest_per_step(run.record.training_evaluations), name
            )
            groups[dumps(run.loss_settings(loss_settings))].append(curves.Line(run.name, values, kind))
        for lines in groups.values():
            suffix = f": {', '.join(line.name for line in lines)}" if len(groups) > 1 else ""
            end = max((int(line.values.index.max()) for line in lines if len(line.values)), default=1)
            drawn.append(curves.draw_lines(title + suffix, lines, end))
    return drawn
