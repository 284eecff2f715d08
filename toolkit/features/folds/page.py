"""The predictions of all folds, and their page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.labels import Labels
from toolkit.data.table import Table
from toolkit.errors import UserError
from toolkit.evaluation import classification_metrics
from toolkit.features.folds.suspects import (
    add_corrections,
    arrays_of,
    error_line,
    find_suspects,
)
from toolkit.report.files import dumps, write_atomically
from toolkit.report.record import Record
from toolkit.report.templates import render

ERRORS = "label_errors.jsonl"
_MAX_SUSPECTS = 500


def write_page(
    folder: Path,
    table: Table,
    texts: Sequence[str],
    label_columns: Sequence[str],
    held_out: Sequence[np.ndarray],
) -> list[str]:
    """Writes out_of_fold.jsonl, label_errors.jsonl and report.html from the runs `fold-1`, ..., and
    returns lines to print. Raises UserError for a run whose last evaluation is not of its part."""
    records = [Record.load(folder / f"fold-{fold}") for fold in range(1, len(held_out) + 1)]
    lines: list[dict[str, Any]] = []
    for fold, (record, rows) in enumerate(zip(records, held_out, strict=True), 1):
        lines += _predictions(folder / f"fold-{fold}", record, rows, texts)
    lines.sort(key=lambda line: line["id"])
    write_atomically(folder / "out_of_fold.jsonl", (f"{dumps(line)}\n" for line in lines))
    data = records[0].data
    labels = Labels(data["problem_type"], tuple(data["labels"]), tuple(label_columns))
    truth, scores = arrays_of(lines, labels)
    suspects = find_suspects(lines, truth, labels)
    add_corrections(suspects, lines, table, labels, data.get("label_separator"))
    write_atomically(folder / ERRORS, (f"{dumps(error_line(each))}\n" for each in suspects))
    metrics = classification_metrics(scores, truth, labels)
    names = [name for name, value in metrics.items() if isinstance(value, float)]
    for record in records:  # a user's recipe may have other metrics
        names = [name for name in names if name in record.last.single_numbers]
    context = {
        "record": records[0],
        "records": records,
        "folder": folder.resolve().name,
        "count": len(lines),
        "names": names,
        "metrics": metrics,
        "suspects": suspects,
        "shown": suspects[:_MAX_SUSPECTS],
    }
    page = render(Path(__file__).with_name("folds.html"), context)
    write_atomically(folder / "report.html", [page])
    results = "  ".join(f"{name} {metrics[name]:.4f}" for name in names)
    return [
        f"out of fold, {len(lines)} rows: {results}",
        f"suspected labels: {len(suspects)}",
        f"  {folder}/report.html         review them, and save corrections",
        f"  {folder}/{ERRORS}   the same as corrections, all accepted",
        f"  {folder}/out_of_fold.jsonl   every row with its out-of-fold probabilities",
        "next:",
        "  toolkit correct-labels TRAIN_FILE corrections.jsonl OUTPUT",
    ]


def _predictions(
    run: Path, record: Record, rows: np.ndarray, texts: Sequence[str]
) -> Iterator[dict[str, Any]]:
    lines = list(record.predictions())
    if record.last.split != "validation" or not lines:
        raise UserError(f"{run}: its predictions are not those of its validation rows")
    fold = int(run.name.removeprefix("fold-"))
    for line in lines:
        row = int(rows[line["id"]])
        yield {**line, "id": row, "fold": fold, "text": texts[row]}
