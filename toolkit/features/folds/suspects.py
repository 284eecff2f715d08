"""Labels that are probably wrong, and their corrections."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    known = _known_cells(lines, table, labels)
    for suspect in suspects:
        line = suspect["line"]
        chances = dict(zip(labels.names, line["probabilities"], strict=True))
        choices: list[Any] = [suspect["label"]]
        shown = sorted({*line["label"], *suspect["label"]})
        if labels.problem_type == SINGLE:
            shown = [line["label"], suspect["label"]]
            ranked = sorted(chances, key=lambda name: -chances[name])[:_MAX_CHOICES]
            choices += [name for name in ranked if name not in shown]
        corrections = [_cells_of(label, known, labels.columns, separator) for label in choices]
        texts = [json.dumps(cells, ensure_ascii=False) for cells in corrections]
        line["shown"] = [(name, chances[name]) for name in shown]
        suspect["row_digest"] = digests[suspect["id"]]
        suspect["cells"] = corrections[0]
        suspect["choices"] = list(zip(texts, choices, strict=True))


def _known_cells(
    lines: Sequence[dict[str, Any]], table: Table, labels: Labels
) -> dict[str, tuple[Any, ...]]:
    """Label, as JSON -> the cells of the label columns of a row that has it."""
    by_row = {line["id"]: line["label"] for line in lines}
    known: dict[str, tuple[Any, ...]] = {}
    for numbers, columns in table.cells(labels.columns):
        for number, cells in zip(numbers.tolist(), zip(*columns, strict=True), strict=True):
            if number in by_row:  # not one that --drop_empty_text left out
                known.setdefault(json.dumps(by_row[number]), cells)
    return known


def _cells_of(
    label: Any, known: Mapping[str, tuple[Any, ...]], columns: Sequence[str], separator: str | None
) -> dict[str, Any]:
    """Column -> the cell for this label, as the file writes it."""
    cells = known.get(json.dumps(label))
    if cells is not None:
        return dict(zip(columns, cells, strict=True))
    # several labels that no row has together
    example = next(iter(known.values()))
    if len(columns) > 1:
        types = zip(columns, map(type, example), strict=True)
        return {name: kind(int(name in label)) for name, kind in types}
    if separator:
        return {columns[0]: separator.join(label)}
    if isinstance(example[0], str):
        return {columns[0]: json.dumps(label, ensure_ascii=False)}
    return {columns[0]: label}


def error_line(suspect: dict[str, Any]) -> dict[str, Any]:
    """A line of label_errors.jsonl, which `toolkit correct-labels` reads."""
    line = suspect["line"]
    names = ("id", "row_digest", "cells", "label")
    values = {name: suspect[name] for name in names}
    return {**values, "original_label": line["label"], "text": line["text"]}
