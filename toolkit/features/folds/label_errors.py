"""Which labels are probably wrong, from answers about rows that the models were not trained on."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from sklearn.metrics import balanced_accuracy_score


class Suspect(NamedTuple):
    """A row whose label is probably wrong."""

    place: int
    suggested: tuple[int, ...]
    """Its class; of several labels per text all that it should have."""
    margin: float
    """The probability of what is given less that of what is suggested: the lower the surer."""


def suspects(chances: np.ndarray, labels: np.ndarray, answers: np.ndarray) -> list[Suspect]:
    """Confident learning (Northcutt, Jiang and Chuang, 2021) on out-of-fold probabilities (N, C), labels (N,), or
    (N, C) of 0 and 1, each a question of its own, and the models' answers in the same form; the surest first.

    A row counts for a class when the class's probability reaches the mean it has among the rows labelled so (the
    threshold of the class); rows that count for another class than their label (off the diagonal of the confident
    joint) are suspected, and ranked by the normalised margin. Where the answer is the label there is no suspicion, as
    in cleanlab (`find_label_issues`: "Remove label issues if given label == model prediction"): a class that the models
    hardly know has a threshold so low that rows reach it whose own label is far likelier.
    """
    if labels.ndim == 1:
        return _of_classes(chances, labels, answers)
    by_place: dict[int, list[Suspect]] = defaultdict(list)
    for column in range(labels.shape[1]):
        two = np.stack([1 - chances[:, column], chances[:, column]], axis=1)
        for suspect in _of_classes(two, labels[:, column].astype(int), answers[:, column].astype(int)):
            by_place[suspect.place].append(suspect._replace(suggested=(column,)))
    merged = []
    for place, flips in by_place.items():
        flipped = {suspect.suggested[0] for suspect in flips}
        right = tuple(c for c in range(labels.shape[1]) if bool(labels[place, c]) != (c in flipped))
        merged.append(Suspect(place, right, min(suspect.margin for suspect in flips)))
    return sorted(merged, key=lambda suspect: suspect.margin)


def _of_classes(chances: np.ndarray, labels: np.ndarray, answers: np.ndarray) -> list[Suspect]:
    classes = range(chances.shape[1])
    thresholds = np.array([chances[labels == c, c].mean() if (labels == c).any() else np.inf for c in classes])
    counted = np.where(chances >= thresholds, chances, -1.0)
    other = counted.argmax(axis=1)
    places = np.flatnonzero((counted.max(axis=1) >= 0) & (other != labels) & (answers != labels))
    margins = chances[places, labels[places]] - chances[places, other[places]]
    order = np.argsort(margins, kind="stable")
    return [Suspect(int(places[i]), (int(other[places[i]]),), float(margins[i])) for i in order]


def skill(labels: np.ndarray, answers: np.ndarray) -> float:
    """From 0, one answer for all rows, to 1, no mistake: the mean recall of the classes that occur, adjusted for
    chance; 1 where all rows have one class. (N,) classes; of (N, C) 0 and 1 it is the mean over the labels that some
    rows have and others have not."""
    columns = zip(labels.T, answers.T, strict=True) if labels.ndim == 2 else [(labels, answers)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "y_pred contains classes not in y_true")
        scores = [balanced_accuracy_score(g, a, adjusted=True) for g, a in columns if np.ptp(g)]
    return float(np.mean(scores or [1]))
