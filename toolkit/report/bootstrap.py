"""Confidence intervals of metrics (bootstrap over rows), and paired permutation tests between two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse, stats
from sklearn.preprocessing import MultiLabelBinarizer

_RESAMPLES, _MIN_RESAMPLES, _MAX_DRAWS = 1000, 100, 10**8
_MAX_BATCH, _MAX_BATCH_DRAWS = 50, 5 * 10**6  # resamples in memory at a time, and their rows: 40 MB


class Scores(NamedTuple):
    """One run's M metrics, as a function of the mean over N rows of F features."""

    names: Sequence[str]
    rows: Any
    """(N, F) sparse; for classes the first column is 1 where the row's whole prediction is right."""
    metrics: Callable[[np.ndarray], np.ndarray] = np.asarray
    """(R, F) means over rows -> (R, M)."""


def scores_of(lines: Sequence[dict[str, Any]], problem_type: str, classes: Sequence[str]) -> Scores:
    """Lines of predictions.jsonl -> scores."""
    if "scores" in lines[0]:
        names = sorted(lines[0]["scores"])
        weights = np.array([[line.get("weight", 1.0)] for line in lines], np.float64)
        weighted = weights * [[float(line["scores"][name]) for name in names] for line in lines]
        rows = sparse.csr_array(np.hstack([weighted, weights]))
        return Scores(names, rows, lambda means: means[..., :-1] / np.maximum(means[..., -1:], np.finfo(float).tiny))
    if problem_type == "regression":
        errors = np.array([np.subtract(line["prediction"], line["label"]) for line in lines]).reshape(len(lines), -1)
        rows = np.stack([np.abs(errors).mean(axis=1), np.square(errors).mean(axis=1)], axis=1)
        return Scores(("mae", "mse"), sparse.csr_array(rows))
    binarizer = MultiLabelBinarizer(classes=classes, sparse_output=True)

    def label_sets(key: str) -> Any:
        labels = (line[key] for line in lines)  # a name, None where the model abstained, or a list of names
        return binarizer.fit_transform([[x] if isinstance(x, str) else x or [] for x in labels])

    return class_scores(label_sets("label"), label_sets("prediction"), problem_type)


def class_scores(truth: Any, guess: Any, problem_type: str) -> Scores:
    """Sparse one-hot (N, C) labels and predictions -> scores."""
    truth, guess = sparse.csr_array(truth, dtype=np.float64), sparse.csr_array(guess, dtype=np.float64)
    several = problem_type == "multi_label_classification"

    def metrics(means: np.ndarray) -> np.ndarray:
        hits, true, guessed = np.split(means[:, 1:], 3, axis=1)  # (R, C) each
        tiny = np.finfo(float).tiny  # for classes that are neither labels nor predictions: 0 / 0
        f1_macro = (2 * hits / np.maximum(true + guessed, tiny)).mean(axis=1)
        f1_micro = 2 * hits.sum(axis=1) / np.maximum((true + guessed).sum(axis=1), tiny)
        return np.stack([means[:, 0], f1_macro, *[f1_micro] * several], axis=1)

    right = np.asarray(abs(truth - guess).sum(axis=1)).ravel() == 0
    rows = sparse.hstack([sparse.csr_array(right[:, None].astype(float)), truth.multiply(guess), truth, guess], "csr")
    return Scores(["accuracy", "f1_macro", *["f1_micro"] * several], rows, metrics)


def intervals(scores: Scores) -> dict[str, dict[str, float]]:
    """Each metric's `value`, with its 95 % percentile interval over resampled rows (`low`, `high`)."""
    count = scores.rows.shape[0]

    def statistic(rows: np.ndarray, axis: int = -1) -> np.ndarray:
        """(B, N) numbers of rows -> (M, B) metrics."""
        weights = np.stack([np.bincount(sample, minlength=count) for sample in rows], axis=1).astype(float)  # (N, B)
        return scores.metrics((scores.rows.T @ weights).T / count).T

    low = high = values = statistic(np.arange(count)[None])[:, 0]
    if count > 1:  # scipy refuses a single row
        low, high = stats.bootstrap(
            (np.arange(count),), statistic, vectorized=True, method="percentile", rng=0, **_resamples(count),
        ).confidence_interval  # fmt: skip
    rows = zip(scores.names, *np.stack([values, low, high]).tolist(), strict=True)
    return {name: {"value": value, "low": low, "high": high} for name, value, low, high in rows}


def p_values(one: Scores, other: Scores) -> dict[str, float]:
    """Two-sided p of each metric's difference between two models on the same rows, by a paired permutation test, which
    swaps the two models' predictions of random rows (for accuracy this is McNemar's test)."""
    change = other.rows - one.rows
    change = change[abs(change).sum(axis=1) > 0].T  # (F, D): the D rows whose predictions differ
    count, differing = one.rows.shape[0], change.shape[1]
    if differing < 2:  # swapping a single row gives a difference of the same size
        return dict.fromkeys(one.names, 1.0)

    def statistic(swapped: np.ndarray, _: np.ndarray, axis: int = -1) -> np.ndarray:
        """(..., D), 1 where the predictions are swapped -> (..., M) differences."""
        moved = (change @ swapped.reshape(-1, differing).T).T / count
        difference = one.metrics(one.rows.mean(axis=0) + moved) - other.metrics(other.rows.mean(axis=0) - moved)
        return difference.reshape(*swapped.shape[:-1], -1)

    p = stats.permutation_test(
        (np.zeros(differing), np.ones(differing)), statistic, permutation_type="samples", vectorized=True, rng=0,
        **_resamples(differing),
    ).pvalue  # fmt: skip
    return dict(zip(one.names, p.tolist(), strict=True))


def _resamples(rows: int) -> dict[str, int]:
    """1,000, and fewer above 100,000 rows, where fewer are in memory, too."""
    count = max(_MIN_RESAMPLES, min(_RESAMPLES, _MAX_DRAWS // rows))
    return {"n_resamples": count, "batch": max(1, min(_MAX_BATCH, _MAX_BATCH_DRAWS // rows))}
