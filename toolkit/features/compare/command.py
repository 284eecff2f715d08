"""`toolkit compare RUN ...`: metrics with intervals as text, or on a page with curves."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from toolkit.report import curves
from toolkit.report.comparison import LEGEND, Comparison, compare
from toolkit.report.files import write_atomically
from toolkit.report.templates import render

_MAX_CURVES = 8


def run(options: Namespace) -> None:
    comparison = compare(options.runs)
    if options.output:
        write_page(Path(options.output), comparison)
    print(comparison)


def write_page(path: Path, comparison: Comparison) -> None:
    metric = comparison.metric
    lines = {}
    for run in comparison.runs[:_MAX_CURVES]:
        lines[run.name] = curves.values_of(run.record.training_evaluations, metric)
    context = {
        "runs": comparison.runs,
        "record": comparison.runs[0].record,
        "metric": metric,
        "table": comparison.table,
        "legend": LEGEND,
        "charts": [curves.draw_lines(f"{metric} (validation)", lines)],
    }
    write_atomically(path, [render(Path(__file__).with_name("compare.html"), context)])
