"""Finds probably wrong labels from out-of-fold predictions."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from sklearn.metrics import balanced_accuracy_score


class Suspect(NamedTuple):
    """A row whose label is probably wrong."""

    row: int
    suggested: tuple[int, ...]
    """The predicted class; with several labels per text, all suggested labels."""
    margin: float
    """Probability of the label minus that of the suggestion; lower is more certain."""


def find_suspects(
    probabilities: np.ndarray, labels: np.ndarray, answers: np.ndarray
) -> list[Suspect]:
    """Confident learning (Northcutt, Jiang and Chuang, 2021), the most certain suspects first.

    Takes out-of-fold probabilities (N, C), labels (N,) or, each label for itself, (N, C) of 0 and 1, and predictions in
    the same form. The threshold of a class is its mean probability among the rows with its label. A row is suspected if
    another class than its label reaches the threshold (off the diagonal of the confident joint) and the prediction is
    not the label, as in cleanlab's `find_label_issues`: the threshold of a poorly learned class is very low.
    """
    if labels.ndim == 1:
        return _find_in_classes(probabilities, labels, answers)
    flips: dict[int, list[Suspect]] = defaultdict(list)
    for column in range(labels.shape[1]):
        binary = np.stack([1 - probabilities[:, column], probabilities[:, column]], axis=1)
        for suspect in _find_in_classes(
            binary, labels[:, column].astype(int), answers[:, column].astype(int)
        ):
            flips[suspect.row].append(suspect._replace(suggested=(column,)))
    merged = []
    for row, of_row in flips.items():
        flipped = {suspect.suggested[0] for suspect in of_row}
        suggested = tuple(
            c for c in range(labels.shape[1]) if bool(labels[row, c]) != (c in flipped)
        )
        merged.append(Suspect(row, suggested, min(suspect.margin for suspect in of_row)))
    return sorted(merged, key=lambda suspect: suspect.margin)


def _find_in_classes(
    probabilities: np.ndarray, labels: np.ndarray, answers: np.ndarray
) -> list[Suspect]:
    classes = range(probabilities.shape[1])
    thresholds = np.array(
        [probabilities[labels == c, c].mean() if (labels == c).any() else np.inf for c in classes]
    )
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    other = confident.argmax(axis=1)
    rows = np.flatnonzero((confident.max(axis=1) >= 0) & (other != labels) & (answers != labels))
    # not `other`: a rare class, whose threshold is near 0, would be suggested for rows that are nothing like it
    suggested = answers[rows]
    margins = probabilities[rows, labels[rows]] - probabilities[rows, suggested]
    order = np.argsort(margins, kind="stable")
    return [Suspect(int(rows[i]), (int(suggested[i]),), float(margins[i])) for i in order]


def balanced_skill(labels: np.ndarray, answers: np.ndarray) -> float:
    """Balanced accuracy, adjusted so that one answer for all rows has 0; 1 if all rows have the same class.

    Takes classes (N,), or (N, C) of 0 and 1: then the mean over the labels that occur in some rows, not in all."""
    columns = zip(labels.T, answers.T, strict=True) if labels.ndim == 2 else [(labels, answers)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "y_pred contains classes not in y_true")
        scores = [balanced_accuracy_score(g, a, adjusted=True) for g, a in columns if np.ptp(g)]
    return float(np.mean(scores or [1]))
