"""Answers -> the columns that `toolkit predict` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.evaluation.answers import Answers, ClassAnswers


def columns_of(answers: Answers, outputs: Any, with_probabilities: bool) -> dict[str, list[Any]]:
    """The columns of predictions for titles, or (N, C) logits: `prediction`, and `probability_A`
    for each class A; of several numbers `prediction_A` for each."""
    lines = list(answers.answers(outputs))
    predictions = [line["prediction"] for line in lines]
    columns = {"prediction": predictions}
    if not isinstance(answers, ClassAnswers):
        return columns
    labels = answers.labels
    if labels.problem_type == "regression":
        if labels.size > 1:
            return _by_name("prediction", labels.names, predictions)
    elif with_probabilities:
        probabilities = [line["probabilities"] for line in lines]
        columns |= _by_name("probability", labels.names, probabilities)
    return columns


def _by_name(
    prefix: str, names: Sequence[str], rows: Sequence[Sequence[float]]
) -> dict[str, list[Any]]:
    return {f"{prefix}_{name}": [row[place] for row in rows] for place, name in enumerate(names)}
