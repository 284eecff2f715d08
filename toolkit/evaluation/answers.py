"""Outputs as a reader wants them: names and probabilities, a line a sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from toolkit.data.labels import Labels
from toolkit.evaluation.metrics import probabilities_of
from toolkit.evaluation.predict import Predictions


def prediction_lines(predictions: Predictions, labels: Labels) -> Iterator[dict[str, Any]]:
    """id (row in the source, from 0), label, prediction, probabilities (in the order of the classes)."""
    probabilities = probabilities_of(predictions.logits, labels.problem_type)
    for row, truth, chances in zip(predictions.ids, predictions.labels, probabilities, strict=True):
        yield {"id": int(row), "label": readable(truth, labels), **decide(chances, labels)}


def decide(chances: np.ndarray, labels: Labels) -> dict[str, Any]:
    """(C,) probabilities -> prediction and probabilities as they are written."""
    rounded = [round(float(chance), 6) for chance in chances]
    if labels.problem_type == "regression":
        return {"prediction": rounded[0]}
    if labels.problem_type == "single_label_classification":
        return {"prediction": labels.names[int(chances.argmax())], "probabilities": rounded}
    return {"prediction": readable(chances > 0.5, labels), "probabilities": rounded}


def readable(label: Any, labels: Labels) -> Any:
    """A label as its name, its names (multi-label) or its number."""
    if labels.problem_type == "single_label_classification":
        return labels.names[int(label)]
    if labels.problem_type == "multi_label_classification":
        return [name for name, present in zip(labels.names, label, strict=True) if present]
    return float(label)
