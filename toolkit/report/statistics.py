"""Confidence intervals of metrics (bootstrap over rows), and paired permutation tests between two
models on the same rows.

scipy's `bootstrap` and `permutation_test` would hold all resamples of all rows in memory, or call
Python once per metric; here a metric is a function of means over rows, so that a resample is one
product with a sparse matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

_RESAMPLES = 1000
_MIN_RESAMPLES = 100
_MAX_DRAWS = 10**8  # rows times resamples
_TINY = np.finfo(float).tiny  # in the place of a denominator 0


class Scores(NamedTuple):
    """One run's M metrics, as a function of the mean over N rows of F features."""

    names: Sequence[str]
    rows: sparse.csr_array
    """(N, F)."""
    metrics: Callable[[np.ndarray], np.ndarray] = np.asarray
    """(F,) means over rows -> (M,)."""


def scores_of(
    lines: Sequence[Mapping[str, Any]], problem_type: str, classes: Sequence[str]
) -> Scores:
    """Lines of predictions.jsonl -> scores. A row without an answer counts as wrong."""
    if problem_type == "regression":
        lines = [{"scores": _errors(line)} for line in lines]
    if "scores" in lines[0]:
        return _weighted_scores(lines)
    from sklearn.preprocessing import MultiLabelBinarizer

    binarizer = MultiLabelBinarizer(classes=classes, sparse_output=True)
    truth = binarizer.fit_transform([_label_set(line["label"]) for line in lines])
    answers = binarizer.fit_transform([_label_set(line["prediction"]) for line in lines])
    return class_scores(truth, answers, problem_type)


def _label_set(label: str | list[str] | None) -> list[str]:
    if isinstance(label, str):
        return [label]
    return label or []


def _weighted_scores(lines: Sequence[Mapping[str, Any]]) -> Scores:
    """Scores that each line has, as titles and masked tokens do, by the line's weight."""
    names = sorted(lines[0]["scores"])
    weights = np.array([[line.get("weight", 1.0)] for line in lines], np.float64)  # (N, 1)
    scores = np.array([[line["scores"][name] for name in names] for line in lines], np.float64)

    def metrics(means: np.ndarray) -> np.ndarray:
        return means[:-1] / max(means[-1], _TINY)

    return Scores(names, sparse.csr_array(np.hstack([weights * scores, weights])), metrics)


def _errors(line: Mapping[str, Any]) -> dict[str, float]:
    difference = np.subtract(line["prediction"], line["label"])
    return {"mae": np.abs(difference).mean(), "mse": np.square(difference).mean()}


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

    is_right = abs(truth - answers).sum(axis=1) == 0
    right = sparse.csr_array(is_right.astype(float).reshape(-1, 1))
    return Scores(names, sparse.hstack([right, truth * answers, truth, answers], "csr"), metrics)


def intervals(scores: Scores) -> dict[str, dict[str, float]]:
    """Each metric's `value`, with its 95 % percentile interval over resampled rows (`low`,
    `high`)."""
    count = scores.rows.shape[0]
    generator = np.random.default_rng(0)
    resampled = []
    for _ in range(_resamples(count)):
        times = np.bincount(generator.integers(count, size=count), minlength=count)
        resampled.append(scores.metrics(times @ scores.rows / count))
    values = scores.metrics(scores.rows.sum(axis=0) / count)
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return {
        name: {"value": float(values[place]), "low": float(low[place]), "high": float(high[place])}
        for place, name in enumerate(scores.names)
    }


def p_values(one: Scores, other: Scores) -> dict[str, float]:
    """Two-sided p of each metric's difference between two models on the same rows, by a paired
    permutation test, which swaps the two models' predictions of random rows (for accuracy this is
    McNemar's test)."""
    change = other.rows - one.rows  # (N, F)
    count = change.shape[0]
    first = one.rows.sum(axis=0) / count
    second = other.rows.sum(axis=0) / count
    observed = abs(one.metrics(first) - other.metrics(second))
    at_least = np.ones(len(one.names))
    resamples = _resamples(count)
    generator = np.random.default_rng(0)
    for _ in range(resamples):
        moved = generator.integers(2, size=count) @ change / count  # of the rows that are swapped
        difference = abs(one.metrics(first + moved) - other.metrics(second - moved))
        at_least += difference >= observed * (1 - 1e-9)  # equal but for rounding
    return dict(zip(one.names, (at_least / (resamples + 1)).tolist(), strict=True))


def _resamples(rows: int) -> int:
    """1,000, and fewer above 100,000 rows."""
    return min(_RESAMPLES, max(_MIN_RESAMPLES, _MAX_DRAWS // rows))
