"""`toolkit compare RUN ...`: metrics with intervals as text, as JSON or on a page with curves."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.report import curves
from toolkit.report.comparison import (
    LEGEND,
    ComparedRun,
    as_text,
    compare,
    table,
)
from toolkit.report.files import dumps, write_atomically
from toolkit.report.record import metric_title
from toolkit.report.templates import render

_MAX_CURVES = 8


def run(options: Namespace) -> None:
    comparison, runs = compare(options.runs)
    if options.output:
        write_page(Path(options.output), comparison, runs)
    print(dumps(comparison, indent=2) if options.json else as_text(comparison))


def write_page(path: Path, comparison: dict[str, Any], runs: Sequence[ComparedRun]) -> None:
    metric = comparison["metric"]
    lines = {}
    for run in runs[:_MAX_CURVES]:
        lines[run.name] = curves.values_of(run.record.training_evaluations, metric)
    title = metric_title(metric)
    context = {
        "comparison": comparison,
        "metric": title,
        "table": table(comparison),
        "legend": LEGEND,
        "charts": [curves.draw_lines(f"{title} on validation", lines)],
    }
    write_atomically(path, [render(Path(__file__).with_name("compare.html"), context)])
