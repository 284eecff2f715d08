"""Labels that are probably wrong, and how the file writes others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from toolkit.data.labels import MULTI, REGRESSION
from toolkit.data.table import Table

Line = dict[str, Any]
"""A line of out_of_fold.jsonl."""
Cells = dict[str, Any]
"""Label column -> the cell of a row."""


def find_suspects(lines: Sequence[Line], data: dict[str, Any]) -> list[Line]:
    """The lines whose labels are probably wrong, by cleanlab's confident learning (Northcutt, Jiang
    and Chuang, 2021), the most certain first. `data`: that of a run's config.json."""
    from cleanlab.filter import find_label_issues

    if data["problem_type"] == REGRESSION:
        return []
    ids = {name: place for place, name in enumerate(data["labels"])}
    several = data["problem_type"] == MULTI
    labels: Any
    if several:
        labels = [[ids[name] for name in line["label"]] for line in lines]
    else:
        labels = np.array([ids[line["label"]] for line in lines])
    places = find_label_issues(
        labels,
        np.array([line["probabilities"] for line in lines]),
        filter_by="confident_learning",
        return_indices_ranked_by="normalized_margin",
        multi_label=several,
        n_jobs=1,
    )
    suspects = [lines[place] for place in places]
    return [line for line in suspects if line["prediction"] != line["label"]]


def cells_by_label(
    lines: Sequence[Line], suspects: Sequence[Line], table: Table, data: dict[str, Any]
) -> dict[str, Cells]:
    """Label, as JSON -> how the file writes it: all labels that rows have, and those predicted for
    the suspects."""
    columns = table.rows.select_columns(data.get("label_columns", []))
    rows = {json.dumps(line["label"]): line["id"] for line in lines}
    cells = {label: columns[row] for label, row in rows.items()}
    for line in suspects:
        label = json.dumps(line["prediction"])
        if label not in cells:
            example = columns[line["id"]]
            cells[label] = _new_cells(
                line["prediction"], example, data.get("label_separator")
            )
    return cells


def _new_cells(label: Any, example: Cells, separator: str | None) -> Cells:
    """The cells for several labels that no row has together, of the types of another row's."""
    if len(example) > 1:
        return {name: type(cell)(int(name in label)) for name, cell in example.items()}
    ((column, cell),) = example.items()
    if separator:
        return {column: separator.join(label)}
    if isinstance(cell, str):
        return {column: json.dumps(label, ensure_ascii=False)}
    return {column: label}
