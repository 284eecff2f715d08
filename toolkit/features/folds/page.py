"""The predictions of all folds -> probably wrong labels, and their page."""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.labels import MULTI, SINGLE, Labels
from toolkit.data.table import Table
from toolkit.data.tokens import load_split
from toolkit.errors import UserError
from toolkit.evaluation import classification_metrics
from toolkit.features.folds.split import row_digest
from toolkit.report.files import Record, dumps, write_atomically
from toolkit.report.html import worst_slices
from toolkit.report.templates import render
from toolkit.utils.files import cache_folder

ERRORS = "label_errors.jsonl"
_WEAK = 0.25
"""Below this `balanced_skill`, suspects are rather mistakes of the models than wrong labels."""
_MAX_SUSPECTS = 500
_MAX_CHOICES = 12


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
    first = records[0]
    labels = Labels(first.data["problem_type"], tuple(first.data["labels"]), tuple(label_columns))
    truth, scores = _arrays(lines, labels)
    metrics = classification_metrics(scores, truth, labels)
    suspects = find_suspects(lines, truth, labels)
    _add_corrections(lines, suspects, table, labels, first.data.get("label_separator"))
    errors = [
        {**suspect, "text": suspect["line"]["text"], "original_label": suspect["line"]["label"]}
        for suspect in suspects
    ]
    hidden = ("line", "choices")
    write_atomically(
        folder / ERRORS,
        (f"{dumps({k: v for k, v in error.items() if k not in hidden})}\n" for error in errors),
    )
    by_fold = [record.last.single_numbers for record in records]
    # a user's recipe may have other metrics
    names = [name for name, value in metrics.items() if isinstance(value, float)]
    names = [name for name in names if all(name in numbers for numbers in by_fold)]
    context = {
        "record": first,
        "records": records,
        "folder": folder.resolve().name,
        "count": len(lines),
        "names": names,
        "metrics": metrics,
        "spread": {n: statistics.stdev([numbers[n] for numbers in by_fold]) for n in names},
        "warning": _warning(lines, truth, labels),
        "suspects": suspects,
        "shown": suspects[:_MAX_SUSPECTS],
        **_slices(folder, records, lines),
    }
    page = render(Path(__file__).with_name("folds.html"), context)
    write_atomically(folder / "report.html", [page])
    results = "  ".join(f"{name} {metrics[name]:.4f}" for name in names)
    result = [f"out of fold, {len(lines)} rows: {results}", f"suspected labels: {len(suspects)}"]
    if context["warning"]:
        result.insert(0, context["warning"])
    return [
        *result,
        f"  {folder}/report.html         review them, and save corrections",
        f"  {folder}/{ERRORS}   the same as corrections, all accepted",
        f"  {folder}/out_of_fold.jsonl   every row with its out-of-fold probabilities",
        "next:",
        "  toolkit correct-labels TRAIN_FILE corrections.jsonl OUTPUT",
    ]


def _predictions(run: Path, record: Record, rows: np.ndarray) -> list[dict[str, Any]]:
    lines = record.of_last(list(record.predictions(run)))
    if record.last.split != "validation" or not lines:
        raise UserError(f"{run}: its predictions are not those of its validation rows")
    fold = int(run.name.removeprefix("fold-"))
    return [{**line, "id": int(rows[line["id"]]), "fold": fold} for line in lines]


def _arrays(lines: Sequence[dict[str, Any]], labels: Labels) -> tuple[np.ndarray, np.ndarray]:
    """(labels (N,) or (N, C), scores (N, C)), as `classification_metrics` takes them."""
    if labels.problem_type == SINGLE:
        ids = {name: place for place, name in enumerate(labels.names)}
        truth = np.array([ids[line["label"]] for line in lines])
        return truth, np.array([line["probabilities"] for line in lines])
    if labels.problem_type == MULTI:
        rows = [[name in line["label"] for name in labels.names] for line in lines]
        return np.array(rows, float), np.array([line["probabilities"] for line in lines]) - 0.5
    numbers = np.array([line["prediction"] for line in lines], float)
    return np.array([line["label"] for line in lines], float), numbers.reshape(len(lines), -1)


def find_suspects(
    lines: Sequence[dict[str, Any]], truth: np.ndarray, labels: Labels
) -> list[dict[str, Any]]:
    """The lines whose labels are probably wrong, by cleanlab's confident learning (Northcutt, Jiang
    and Chuang, 2021), with the label that the model predicts; the most certain first."""
    from cleanlab.filter import find_label_issues

    if labels.problem_type not in (SINGLE, MULTI):
        return []
    probabilities = np.array([line["probabilities"] for line in lines])
    several = labels.problem_type == MULTI
    given: Any = truth
    if several:
        given = [np.flatnonzero(row).tolist() for row in truth]
    places = find_label_issues(
        given,
        probabilities,
        filter_by="confident_learning",
        return_indices_ranked_by="normalized_margin",
        multi_label=several,
        n_jobs=1,
    )
    suspects = []
    for place in places:
        line = lines[place]
        row = probabilities[place]
        predicted: Any = labels.names[row.argmax()]
        if several:
            predicted = [name for name, value in zip(labels.names, row, strict=True) if value > 0.5]
        if predicted != line["label"]:
            suspects.append({"line": line, "id": line["id"], "label": predicted})
    return suspects


def _add_corrections(
    lines: Sequence[dict[str, Any]],
    suspects: Sequence[dict[str, Any]],
    table: Table,
    labels: Labels,
    separator: str | None,
) -> None:
    """Adds to each suspect what `toolkit correct-labels` reads, `row_digest` and the new `cells`,
    and the labels to choose from."""
    rows = np.array(sorted(suspect["id"] for suspect in suspects), np.int64)
    names = table.rows.column_names
    digests = {}
    for numbers, columns in table.select(rows).cells(names):
        for number, cells in zip(numbers.tolist(), zip(*columns, strict=True), strict=True):
            digests[number] = row_digest(cells)
    cells_of = _Cells(lines, table, labels, separator)
    for suspect in suspects:
        line = suspect["line"]
        suspect["row_digest"] = digests[suspect["id"]]
        suspect["cells"] = cells_of(suspect["label"])
        chances = dict(zip(labels.names, line["probabilities"], strict=True))
        likely: list[Any] = [suspect["label"]]
        shown = sorted({*line["label"], *suspect["label"]})
        if labels.problem_type == SINGLE:
            shown = [line["label"], suspect["label"]]
            ranked = sorted(chances, key=lambda name: -chances[name])[:_MAX_CHOICES]
            likely += [name for name in ranked if name not in shown]
        line["shown"] = [(name, chances[name]) for name in shown]
        suspect["choices"] = [
            (json.dumps(cells_of(label), ensure_ascii=False), label) for label in likely
        ]


class _Cells:
    """A label -> the cells of the label columns of its row, written as the file writes them."""

    def __init__(
        self,
        lines: Sequence[dict[str, Any]],
        table: Table,
        labels: Labels,
        separator: str | None,
    ) -> None:
        self.columns = labels.columns
        self.separator = separator
        self.known: dict[str, tuple[Any, ...]] = {}
        """Label, as JSON -> the cells of a row that has it."""
        by_row = {line["id"]: line["label"] for line in lines}
        self.example: tuple[Any, ...] = ()
        for numbers, columns in table.cells(labels.columns):
            for number, cells in zip(numbers.tolist(), zip(*columns, strict=True), strict=True):
                if number in by_row:
                    self.known.setdefault(json.dumps(by_row[number]), cells)
                    self.example = cells

    def __call__(self, label: Any) -> dict[str, Any]:
        known = self.known.get(json.dumps(label))
        if known is None:
            known = self._written(label)
        return dict(zip(self.columns, known, strict=True))

    def _written(self, label: list[str]) -> tuple[Any, ...]:
        """Several labels that no row has together."""
        if len(self.columns) > 1:
            return tuple(
                type(cell)(int(name in label))
                for name, cell in zip(self.columns, self.example, strict=True)
            )
        if self.separator:
            return (self.separator.join(label),)
        if isinstance(self.example[0], str):
            return (json.dumps(label, ensure_ascii=False),)
        return (label,)


def _warning(lines: Sequence[dict[str, Any]], truth: np.ndarray, labels: Labels) -> str:
    """Why not to trust the suspects, or empty."""
    if labels.problem_type not in (SINGLE, MULTI):
        return ""
    guesses, _ = _arrays([{**line, "label": line["prediction"]} for line in lines], labels)
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


def _slices(
    folder: Path, records: Sequence[Record], lines: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """`slices`: values of columns, and lengths, with more errors than average; `wrong`: the share of
    wrong rows. A column may have only one value, or too many, in a fold: these rows are in none."""
    if records[0].problem_type not in (SINGLE, MULTI):
        return {"slices": [], "wrong": 0.0}
    groups: dict[str, list[Any]] = {"label": [str(line["label"]) for line in lines]}
    place_of = {(line["fold"], line["id"]): place for place, line in enumerate(lines)}
    for fold, record in enumerate(records, 1):
        prepared = cache_folder() / "tokens" / str(record.data["digest"])
        if not (prepared / "validation").is_dir():
            continue
        split = load_split(prepared, "validation")
        ids = sorted(line["id"] for line in lines if line["fold"] == fold)
        for name, values in split.groups().items():
            column = groups.setdefault(name, [None] * len(lines))
            for row, value in zip(ids, values, strict=True):
                column[place_of[fold, row]] = value
    wrong = np.array([line["prediction"] != line["label"] for line in lines])
    return {"slices": worst_slices(wrong, groups), "wrong": float(wrong.mean())}
