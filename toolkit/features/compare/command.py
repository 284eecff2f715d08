"""`toolkit compare RUN...`: a table of runs in the terminal, and a page with their curves."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.report import curves
from toolkit.report.comparison import LOSS_SETTINGS, ComparedRun, as_text, compare, notes, tables
from toolkit.report.files import dumps, write_atomically
from toolkit.report.templates import render

_MAX_CURVES = 8
_TRAINING_LOSS_SETTINGS = LOSS_SETTINGS | {
    "sampling", "r_drop_alpha", "fgm_epsilon", "teacher", "distillation_temperature",
    "distillation_alpha",
}  # fmt: skip


def run(options: Namespace) -> None:
    comparison, runs = compare(options.runs)
    if options.output:
        write_page(Path(options.output), comparison, runs)
    print(dumps(comparison, indent=2) if options.json else as_text(comparison))


def write_page(path: Path, comparison: dict[str, Any], runs: Sequence[ComparedRun]) -> None:
    context = {
        "comparison": comparison,
        "tables": tables(comparison),
        "notes": notes(comparison),
        "charts": charts(comparison, runs[:_MAX_CURVES]),
        "num_without_curves": len(runs) - _MAX_CURVES,
    }
    write_atomically(path, [render(Path(__file__).with_name("compare.html"), context)])


def charts(comparison: dict[str, Any], runs: Sequence[ComparedRun]) -> list[curves.Chart]:
    """The curves of these runs, without those of losses whose definitions differ."""
    steps = [run.record.steps for run in runs]
    evaluations = [run.record.training_evaluations for run in runs]
    end = max((lines[-1]["step"] for lines in steps if lines), default=1)

    def draw(title: str, records: Sequence[Any], name: str, kind: Any) -> curves.Chart:
        lines = [
            curves.Line(run.name, curves.values_of(values, name), kind)
            for run, values in zip(runs, records, strict=True)
        ]
        return curves.draw_lines(title, lines, end)

    metric = comparison["metric"]
    differing = comparison["settings"].keys()
    title = f"{runs[0].record.metric_title(metric)} on validation"
    drawn = [draw(title, evaluations, metric, "points")]
    if not differing & LOSS_SETTINGS and metric != "loss":
        drawn.append(draw("Validation loss", evaluations, "loss", "points"))
    if not differing & _TRAINING_LOSS_SETTINGS:
        drawn.append(draw("Training loss, a moving average", steps, "loss", "mean"))
    return drawn
