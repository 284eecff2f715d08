"""Labels that are probably wrong, and their corrections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from toolkit.data.labels import MULTI, SINGLE, Labels
from toolkit.data.table import Table
from toolkit.features.folds.split import row_digest

_MAX_CHOICES = 12


def arrays_of(lines: Sequence[dict[str, Any]], labels: Labels) -> tuple[np.ndarray, np.ndarray]:
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


def add_corrections(
    suspects: Sequence[dict[str, Any]],
    lines: Sequence[dict[str, Any]],
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


def error_line(suspect: dict[str, Any]) -> dict[str, Any]:
    """A line of label_errors.jsonl, which `toolkit correct-labels` reads."""
    line = suspect["line"]
    names = ("id", "row_digest", "cells", "label")
    values = {name: suspect[name] for name in names}
    return {**values, "original_label": line["label"], "text": line["text"]}
