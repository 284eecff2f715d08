"""`toolkit compare RUN...`: a table of runs in the terminal, and a page with their curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.report import curves
from toolkit.report.comparison import (
    LOSS_SETTINGS,
    TRAINING_LOSS_SETTINGS,
    ComparedRun,
    as_text,
    compare,
    notes,
    tables,
)
from toolkit.report.files import dumps, write_atomically
from toolkit.report.templates import render

_MAX_CURVES = 8


def run(options: Any) -> None:
    comparison, runs = compare(options.runs)
    if options.output:
        write_page(Path(options.output), comparison, runs)
    print(dumps(comparison, indent=2) if options.json else as_text(comparison))


def write_page(path: Path, comparison: dict[str, Any], runs: Sequence[ComparedRun]) -> None:
    context = {
        "comparison": comparison, "tables": tables(comparison), "notes": notes(comparison),
        "charts": charts(comparison, runs[:_MAX_CURVES]), "num_without_curves": len(runs) - _MAX_CURVES,
    }  # fmt: skip
    write_atomically(path, [render(Path(__file__).with_name("compare.html"), context)])


def charts(comparison: dict[str, Any], runs: Sequence[ComparedRun]) -> list[curves.Chart]:
    """The curves of these runs, without those of losses whose definitions differ."""
    steps, evaluations = (
        [run.record.steps for run in runs],
        [run.record.training_evaluations for run in runs],
    )
    end = max((lines[-1]["step"] for lines in steps if lines), default=1)

    def draw(
        title: str, lines_of_runs: Sequence[list[dict[str, Any]]], name: str, kind: Any
    ) -> curves.Chart:
        values = [curves.values_of(lines, name) for lines in lines_of_runs]
        lines = [
            curves.Line(run.name, numbers, kind) for run, numbers in zip(runs, values, strict=True)
        ]
        return curves.draw_lines(title, lines, end)

    metric, differing = comparison["metric"], comparison["settings"].keys()
    drawn = [
        draw(f"{runs[0].record.metric_title(metric)} on validation", evaluations, metric, "points")
    ]
    if not differing & LOSS_SETTINGS and metric != "loss":
        drawn.append(draw("Validation loss", evaluations, "loss", "points"))
    if not differing & TRAINING_LOSS_SETTINGS:
        drawn.append(draw("Training loss, a moving average", steps, "loss", "mean"))
    return drawn
