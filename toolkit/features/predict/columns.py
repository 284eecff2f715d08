"""Answers -> the columns that `toolkit predict` writes."""

from __future__ import annotations

from typing import Any

from toolkit.data.labels import REGRESSION
from toolkit.evaluation.answers import Answers, ClassAnswers


def column_names(answers: Answers, with_probabilities: bool) -> list[str]:
    """`prediction`, and `probability_A` for each class A; of several numbers `prediction_A` for
    each."""
    names = ["prediction"]
    if not isinstance(answers, ClassAnswers):
        return names
    labels = answers.labels
    if labels.problem_type == REGRESSION:
        if labels.size > 1:
            return [f"prediction_{name}" for name in labels.names]
    elif with_probabilities:
        names += [f"probability_{name}" for name in labels.names]
    return names


def columns_of(answers: Answers, outputs: Any, names: list[str]) -> dict[str, list[Any]]:
    """The columns with these names, for titles or (N, C) logits."""
    rows = []
    for line in answers.answers(outputs):
        if names[0] == "prediction":
            rows.append([line["prediction"], *line.get("probabilities", ())])
        else:  # several numbers
            rows.append(line["prediction"])
    return {name: [cells[place] for cells in rows] for place, name in enumerate(names)}
