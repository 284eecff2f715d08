"""Answers -> the columns that `toolkit predict` writes, or a line that it prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from toolkit.evaluation.answers import Answers, ClassAnswers


def columns_of(
    answers: Answers, outputs: Any, flat: bool, with_probabilities: bool
) -> dict[str, list[Any]]:
    """The columns of predictions for titles, or (N, C) logits; `flat`: a column for each class or
    number, as for CSV, not one of lists."""
    lines = list(answers.answers(outputs))
    predictions = [line["prediction"] for line in lines]
    columns: dict[str, list[Any]] = {"prediction": predictions}
    if not isinstance(answers, ClassAnswers):
        return columns
    labels = answers.labels
    if labels.problem_type == "regression":
        if flat and labels.size > 1:
            columns = _by_name("prediction", labels.names, predictions)
    elif with_probabilities:
        rows = [line["probabilities"] for line in lines]
        if flat:
            columns |= _by_name("probability", labels.names, rows)
        else:
            columns["probabilities"] = rows
    return columns


def _by_name(
    prefix: str, names: Sequence[str], rows: Sequence[Sequence[float]]
) -> dict[str, list[Any]]:
    return {f"{prefix}_{name}": [row[place] for row in rows] for place, name in enumerate(names)}


def line_of(line: dict[str, Any], answers: Answers) -> str:
    """A title, numbers, or classes with their probabilities."""
    prediction = line["prediction"]
    if not isinstance(answers, ClassAnswers):
        return str(prediction)
    labels = answers.labels
    if labels.problem_type == "regression":
        numbers = zip(labels.names, np.atleast_1d(prediction), strict=True)
        return " ".join(f"{name} {number:.4g}" for name, number in numbers)
    probabilities = dict(zip(labels.names, line["probabilities"], strict=True))
    if prediction is None:
        best = max(probabilities, key=lambda name: probabilities[name])
        return f"no answer (most probable: {best} {probabilities[best]:.4f})"
    names = prediction
    if isinstance(prediction, str):
        names = [prediction]
    return " ".join(f"{name} {probabilities[name]:.4f}" for name in names) or "none"
