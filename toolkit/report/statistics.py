"""Confidence intervals of metrics, and of the difference between two models on the same rows, by
the bootstrap over rows.

scipy's `bootstrap` would hold all resamples of all rows in memory, or call Python once per metric;
here a metric is a function of means over rows, so that a resample is one product with a sparse
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from toolkit.errors import UserError, listing

_RESAMPLES = 1000
_FEW_RESAMPLES = 100
_MAX_DRAWS = 10**8  # rows times resamples; of more rows fewer resamples
_TINY = np.finfo(float).tiny  # in the place of a denominator 0


Lines = Sequence[Mapping[str, Any]]
"""Of predictions.jsonl."""


class Scores(NamedTuple):
    """One run's M metrics, as a function of the mean over N rows of F features."""

    names: Sequence[str]
    rows: sparse.csr_array
    """(N, F)."""
    metrics: Callable[[np.ndarray], np.ndarray]
    """(F,) means over rows -> (M,)."""


def scores_of(
    lines: Lines, problem_type: str, classes: Sequence[str], where: object = "the run"
) -> Scores:
    """A row without an answer counts as wrong. Raises UserError for a name that is no class;
    `where`: names the run in it."""
    if problem_type == "regression":
        lines = [{"scores": _errors(line)} for line in lines]
    if "scores" in lines[0]:
        return _weighted_scores(lines)
    from sklearn.preprocessing import MultiLabelBinarizer

    binarizer = MultiLabelBinarizer(classes=classes, sparse_output=True)
    label_sets = []
    for key in ("label", "prediction"):
        sets = [_label_set(line[key]) for line in lines]
        others = set[str]().union(*sets).difference(classes)
        if others:
            names = listing(sorted(others))
            raise UserError(
                f"{where}: {key} {names} in predictions.jsonl is no class of it"
            )
        label_sets.append(binarizer.fit_transform(sets))
    truth, answers = label_sets
    return class_scores(truth, answers, problem_type)


def _label_set(label: str | list[str] | None) -> list[str]:
    """One label, or those of a multi-label row; none for a row without an answer."""
    if isinstance(label, str):
        return [label]
    return label or []


def _errors(line: Mapping[str, Any]) -> dict[str, float]:
    """Of one row, means over its numbers."""
    difference = np.subtract(line["prediction"], line["label"])
    return {"mae": np.abs(difference).mean(), "mse": np.square(difference).mean()}


def _weighted_scores(lines: Lines) -> Scores:
    """Scores that each line has, as titles and masked tokens do, by the line's weight."""
    names = sorted(lines[0]["scores"])
    weights = np.array([[line.get("weight", 1.0)] for line in lines])  # (N, 1)
    # (N, M)
    scores = np.array([[line["scores"][name] for name in names] for line in lines])
    rows = np.hstack([weights * scores, weights])

    def metrics(means: np.ndarray) -> np.ndarray:
        return means[:-1] / max(means[-1], _TINY)

    return Scores(names, sparse.csr_array(rows), metrics)


def class_scores(truth: Any, answers: Any, problem_type: str) -> Scores:
    """Sparse one-hot (N, C) labels and answers -> accuracy and F1."""
    truth = sparse.csr_array(truth, dtype=np.float64)
    answers = sparse.csr_array(answers, dtype=np.float64)
    names = ["accuracy", "f1_macro"]
    if problem_type == "multi_label_classification":
        names.append("f1_micro")

    def metrics(means: np.ndarray) -> np.ndarray:
        hits, true, answered = np.split(means[1:], 3)  # (C,) each
        f1_macro = (2 * hits / np.maximum(true + answered, _TINY)).mean()
        f1_micro = 2 * hits.sum() / max((true + answered).sum(), _TINY)
        return np.array([means[0], f1_macro, f1_micro])[: len(names)]

    is_right = abs(truth - answers).sum(axis=1) == 0  # (N,)
    right = sparse.csr_array(is_right.astype(float).reshape(-1, 1))
    hits = truth * answers
    rows = sparse.hstack([right, hits, truth, answers], "csr")
    return Scores(names, rows, metrics)


def differences(one: Scores, other: Scores) -> Scores:
    """The differences of two models' metrics, one minus other. Both are resampled by the same rows:
    they make many of the same mistakes, so that the difference varies less than either metric."""
    count = one.rows.shape[1]

    def metrics(means: np.ndarray) -> np.ndarray:
        return one.metrics(means[:count]) - other.metrics(means[count:])

    rows = sparse.hstack([one.rows, other.rows], "csr")
    return Scores(one.names, rows, metrics)


def intervals(scores: Scores) -> dict[str, dict[str, float]]:
    """Each metric's `value`, with its 95 % percentile interval over resampled rows (`low`,
    `high`)."""
    count = scores.rows.shape[0]
    resamples = max(_FEW_RESAMPLES, min(_RESAMPLES, _MAX_DRAWS // count))
    generator = np.random.default_rng(0)
    resampled = []
    for _ in range(resamples):
        rows = generator.integers(count, size=count)
        times = np.bincount(rows, minlength=count)  # that each row is drawn
        resampled.append(scores.metrics(times @ scores.rows / count))
    values = scores.metrics(scores.rows.sum(axis=0) / count)
    lows, highs = np.percentile(resampled, [2.5, 97.5], axis=0)
    ranges = {}
    for name, value, low, high in zip(scores.names, values, lows, highs, strict=True):
        ranges[name] = {"value": float(value), "low": float(low), "high": float(high)}
    return ranges
