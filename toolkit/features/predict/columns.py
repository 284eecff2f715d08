"""Answers -> the columns that `toolkit predict` writes, or a line that it prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from toolkit.errors import UserError
from toolkit.evaluation.answers import Answers, ClassAnswers


def columns_of(
    answers: Answers, outputs: Any, flat: bool, probabilities: str
) -> dict[str, list[Any]]:
    """The columns of predictions for titles, or (N, C) logits. `probabilities`: `all`, `none`, or
    `top-3`, the names and probabilities of the three most probable classes; `flat`: in a column for
    each class, as for CSV, not in one of lists."""
    labels = answers.labels if isinstance(answers, ClassAnswers) else None
    has_classes = labels is not None and labels.problem_type != "regression"
    if not has_classes and probabilities.startswith("top"):
        raise UserError(f"--probabilities {probabilities}: the model has no classes: leave it out")
    lines = list(answers.answers(outputs))
    predictions = [line["prediction"] for line in lines]
    if labels is None:
        return {"prediction": predictions}
    if not has_classes and flat and labels.size > 1:
        return _by_name("prediction", labels.names, predictions)
    if not has_classes or probabilities == "none":
        return {"prediction": predictions}
    columns: dict[str, list[Any]] = {"prediction": predictions}
    rows = [line["probabilities"] for line in lines]
    if probabilities == "all" and flat:
        columns |= _by_name("probability", labels.names, rows)
    elif probabilities == "all":
        columns["probabilities"] = rows
    else:
        count = int(probabilities.removeprefix("top-"))
        columns |= _most_probable(labels.names, outputs, rows, count, flat)
    return columns


def _by_name(
    prefix: str, names: Sequence[str], rows: Sequence[Sequence[float]]
) -> dict[str, list[Any]]:
    return {f"{prefix}_{name}": [row[place] for row in rows] for place, name in enumerate(names)}


def _most_probable(
    names: Sequence[str], logits: np.ndarray, rows: Sequence[Any], count: int, flat: bool
) -> dict[str, list[Any]]:
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count].tolist()  # (N, at most count)
    classes = [[names[place] for place in places] for places in order]
    best = [[row[place] for place in places] for row, places in zip(rows, order, strict=True)]
    if not flat:
        return {"top_classes": classes, "top_probabilities": best}
    columns: dict[str, list[Any]] = {}
    for place in range(min(count, len(names))):
        columns[f"top_{place + 1}"] = [row[place] for row in classes]
        columns[f"top_{place + 1}_probability"] = [row[place] for row in best]
    return columns


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
