"""The predictions of all folds, and their page."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.labels import MULTI, SINGLE, Labels
from toolkit.data.table import Table
from toolkit.errors import UserError
from toolkit.evaluation import classification_metrics
from toolkit.features.folds.suspects import (
    add_corrections,
    arrays_of,
    error_line,
    find_suspects,
)
from toolkit.report.files import Record, dumps, write_atomically
from toolkit.report.templates import render

ERRORS = "label_errors.jsonl"
_WEAK = 0.25
"""Below this `balanced_skill`, suspects are rather mistakes of the models than wrong labels."""
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
        lines += _predictions(folder / f"fold-{fold}", record, rows)
    lines.sort(key=lambda line: line["id"])
    for line in lines:
        line["text"] = texts[line["id"]]
    write_atomically(folder / "out_of_fold.jsonl", (f"{dumps(line)}\n" for line in lines))
    data = records[0].data
    labels = Labels(data["problem_type"], tuple(data["labels"]), tuple(label_columns))
    truth, scores = arrays_of(lines, labels)
    suspects = find_suspects(lines, truth, labels)
    add_corrections(suspects, lines, table, labels, data.get("label_separator"))
    write_atomically(folder / ERRORS, (f"{dumps(error_line(each))}\n" for each in suspects))
    metrics = classification_metrics(scores, truth, labels)
    by_fold = [record.last.single_numbers for record in records]
    # a user's recipe may have other metrics
    names = [name for name, value in metrics.items() if isinstance(value, float)]
    names = [name for name in names if all(name in numbers for numbers in by_fold)]
    warning = _warning(lines, truth, labels)
    context = {
        "record": records[0],
        "records": records,
        "folder": folder.resolve().name,
        "count": len(lines),
        "names": names,
        "metrics": metrics,
        "spread": {n: statistics.stdev([numbers[n] for numbers in by_fold]) for n in names},
        "warning": warning,
        "suspects": suspects,
        "shown": suspects[:_MAX_SUSPECTS],
    }
    page = render(Path(__file__).with_name("folds.html"), context)
    write_atomically(folder / "report.html", [page])
    results = "  ".join(f"{name} {metrics[name]:.4f}" for name in names)
    result = [
        warning,
        f"out of fold, {len(lines)} rows: {results}",
        f"suspected labels: {len(suspects)}",
        f"  {folder}/report.html         review them, and save corrections",
        f"  {folder}/{ERRORS}   the same as corrections, all accepted",
        f"  {folder}/out_of_fold.jsonl   every row with its out-of-fold probabilities",
        "next:",
        "  toolkit correct-labels TRAIN_FILE corrections.jsonl OUTPUT",
    ]
    return [line for line in result if line]


def _predictions(run: Path, record: Record, rows: np.ndarray) -> list[dict[str, Any]]:
    lines = record.of_last(list(record.predictions(run)))
    if record.last.split != "validation" or not lines:
        raise UserError(f"{run}: its predictions are not those of its validation rows")
    fold = int(run.name.removeprefix("fold-"))
    return [{**line, "id": int(rows[line["id"]]), "fold": fold} for line in lines]


def _warning(lines: Sequence[dict[str, Any]], truth: np.ndarray, labels: Labels) -> str:
    """Why not to trust the suspects, or empty."""
    if labels.problem_type not in (SINGLE, MULTI):
        return ""
    guesses, _ = arrays_of([{**line, "label": line["prediction"]} for line in lines], labels)
    if balanced_skill(truth, guesses) >= _WEAK:
        return ""
    right = 100 * np.mean([line["label"] == line["prediction"] for line in lines])
    largest = 100 * np.unique(truth, axis=0, return_counts=True)[1].max() / len(truth)
    return (
        f"do not rely on the list of wrong labels: the models are right for {right:.1f} % of the "
        f"rows, and the same answer for all would be for {largest:.1f} %; train longer "
        "(--num_train_epochs, --learning_rate), or take a larger model"
    )


def balanced_skill(truth: np.ndarray, guesses: np.ndarray) -> float:
    """Balanced accuracy, adjusted so that one answer for all rows has 0; 1 if all rows have the same
    class. Takes classes (N,), or (N, C) of 0 and 1: then the mean over the labels that vary."""
    from sklearn.metrics import balanced_accuracy_score

    pairs = [(truth, guesses)]
    if truth.ndim == 2:
        pairs = list(zip(truth.T, guesses.T, strict=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "y_pred contains classes not in y_true")
        scores = [
            balanced_accuracy_score(*pair, adjusted=True) for pair in pairs if np.ptp(pair[0])
        ]
    return float(np.mean(scores or [1]))
