"""Answers -> the columns that `toolkit predict` writes."""

from __future__ import annotations

from typing import Any

from toolkit.data.table import Table
from toolkit.errors import UserError, listing
from toolkit.evaluation.answers import Answers, ClassAnswers


def new_columns(table: Table, answers: Answers, with_probabilities: bool) -> list[str]:
    """`prediction`, and `probability_A` for each class A; of several numbers `prediction_A` for
    each. Raises UserError if the table already has one of them."""
    names = _names(answers, with_probabilities)
    existing = [name for name in names if name in table.rows.column_names]
    if existing:
        remedy = "rename it, nothing is overwritten"
        raise UserError(f"{table.name} already has a column {listing(existing)}: {remedy}")
    return names


def _names(answers: Answers, with_probabilities: bool) -> list[str]:
    if isinstance(answers, ClassAnswers):
        labels = answers.labels
        if labels.problem_type == "regression":
            if labels.size > 1:
                return [f"prediction_{name}" for name in labels.names]
        elif with_probabilities:
            return ["prediction", *[f"probability_{name}" for name in labels.names]]
    return ["prediction"]


def columns_of(answers: Answers, outputs: Any, names: list[str]) -> dict[str, list[Any]]:
    """The columns with these names, for titles or (N, C) logits."""
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for line in answers.answers(outputs):
        cells = [line["prediction"], *line.get("probabilities", ())]
        if "prediction" not in columns:
            cells = line["prediction"]  # several numbers
        for name, cell in zip(names, cells, strict=False):
            columns[name].append(cell)
    return columns
