"""Confidence intervals of metrics (bootstrap over rows), and paired permutation tests between two
models on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse, stats

_RESAMPLES, _MIN_RESAMPLES, _MAX_DRAWS = 1000, 100, 10**8
_MAX_ROWS_IN_MEMORY = 5 * 10**6  # of all resamples of a batch: 40 MB
_TINY = np.finfo(float).tiny  # in the place of a denominator 0


class Scores(NamedTuple):
    """One run's M metrics, as a function of the mean over N rows of F features."""

    names: Sequence[str]
    rows: Any
    """(N, F) sparse; for classes the first column is 1 if the row's whole prediction is right."""
    metrics: Callable[[np.ndarray], np.ndarray] = np.asarray
    """(R, F) means over rows -> (R, M)."""


def scores_of(
    lines: Sequence[Mapping[str, Any]], problem_type: str, classes: Sequence[str]
) -> Scores:
    """Lines of predictions.jsonl -> scores."""
    if "scores" in lines[0]:
        return _weighted_scores(lines)
    if problem_type == "regression":
        return _errors(lines)
    from sklearn.preprocessing import MultiLabelBinarizer

    binarizer = MultiLabelBinarizer(classes=classes, sparse_output=True)
    truth = binarizer.fit_transform([_label_set(line["label"]) for line in lines])
    answers = binarizer.fit_transform([_label_set(line["prediction"]) for line in lines])
    return class_scores(truth, answers, problem_type)


def _label_set(label: Any) -> list[str]:
    """`label`: a name, None if the model abstained, or a list of names."""
    if isinstance(label, str):
        return [label]
    return label or []


def _weighted_scores(lines: Sequence[Mapping[str, Any]]) -> Scores:
    """Scores that each line has, as titles and masked tokens do, by the line's weight."""
    names = sorted(lines[0]["scores"])
    weights = np.array([[line.get("weight", 1.0)] for line in lines], np.float64)  # (N, 1)
    scores = np.array([[line["scores"][name] for name in names] for line in lines], np.float64)

    def metrics(means: np.ndarray) -> np.ndarray:
        return means[..., :-1] / np.maximum(means[..., -1:], _TINY)

    return Scores(names, sparse.csr_array(np.hstack([weights * scores, weights])), metrics)


def _errors(lines: Sequence[Mapping[str, Any]]) -> Scores:
    differences = [np.subtract(line["prediction"], line["label"]) for line in lines]
    errors = np.array(differences).reshape(len(lines), -1)  # (N, outputs)
    rows = np.stack([np.abs(errors).mean(axis=1), np.square(errors).mean(axis=1)], axis=1)
    return Scores(("mae", "mse"), sparse.csr_array(rows))


def class_scores(truth: Any, answers: Any, problem_type: str) -> Scores:
    """Sparse one-hot (N, C) labels and answers -> accuracy and F1."""
    truth = sparse.csr_array(truth, dtype=np.float64)
    answers = sparse.csr_array(answers, dtype=np.float64)
    names = ["accuracy", "f1_macro"]
    if problem_type == "multi_label_classification":
        names.append("f1_micro")

    def metrics(means: np.ndarray) -> np.ndarray:
        hits, true, answered = np.split(means[:, 1:], 3, axis=1)  # (R, C) each
        f1_macro = (2 * hits / np.maximum(true + answered, _TINY)).mean(axis=1)
        both = (true + answered).sum(axis=1)
        f1_micro = 2 * hits.sum(axis=1) / np.maximum(both, _TINY)
        return np.stack([means[:, 0], f1_macro, f1_micro][: len(names)], axis=1)

    right = np.asarray(abs(truth - answers).sum(axis=1)).reshape(-1, 1) == 0
    columns = [sparse.csr_array(right.astype(float)), truth.multiply(answers), truth, answers]
    return Scores(names, sparse.hstack(columns, "csr"), metrics)


def intervals(scores: Scores) -> dict[str, dict[str, float]]:
    """Each metric's `value`, with its 95 % percentile interval over resampled rows (`low`,
    `high`)."""
    count = scores.rows.shape[0]

    def statistic(samples: np.ndarray, axis: int = -1) -> np.ndarray:
        """(B, N) numbers of rows -> (M, B) metrics."""
        times = [np.bincount(sample, minlength=count) for sample in samples]
        weights = np.stack(times, axis=1).astype(float)  # (N, B)
        return scores.metrics((scores.rows.T @ weights).T / count).T

    numbers = np.arange(count)
    values = statistic(numbers[None])[:, 0]
    low = high = values
    if count > 1:  # scipy refuses a single row
        low, high = stats.bootstrap(
            (numbers,), statistic, vectorized=True, method="percentile", rng=0, **_resamples(count)
        ).confidence_interval
    table = zip(scores.names, values.tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: {"value": value, "low": low, "high": high} for name, value, low, high in table}


def p_values(one: Scores, other: Scores) -> dict[str, float]:
    """Two-sided p of each metric's difference between two models on the same rows, by a paired
    permutation test, which swaps the two models' predictions of random rows (for accuracy this is
    McNemar's test)."""
    change = other.rows - one.rows
    change = change[abs(change).sum(axis=1) > 0].T  # (F, D): the D rows whose predictions differ
    count = one.rows.shape[0]
    differing = change.shape[1]
    if differing < 2:  # swapping a single row gives a difference of the same size
        return dict.fromkeys(one.names, 1.0)

    def statistic(swapped: np.ndarray, _: np.ndarray, axis: int = -1) -> np.ndarray:
        """(..., D), 1 if the predictions are swapped -> (..., M) differences."""
        moved = (change @ swapped.reshape(-1, differing).T).T / count
        first = one.metrics(one.rows.mean(axis=0) + moved)
        second = other.metrics(other.rows.mean(axis=0) - moved)
        return (first - second).reshape(*swapped.shape[:-1], -1)

    samples = (np.zeros(differing), np.ones(differing))
    p = stats.permutation_test(
        samples, statistic, permutation_type="samples", vectorized=True, rng=0,
        **_resamples(differing),
    ).pvalue  # fmt: skip
    return dict(zip(one.names, p.tolist(), strict=True))


def _resamples(rows: int) -> dict[str, int]:
    """1,000, and fewer above 100,000 rows, where fewer are in memory, too."""
    count = max(_MIN_RESAMPLES, min(_RESAMPLES, _MAX_DRAWS // rows))
    return {"n_resamples": count, "batch": max(1, min(50, _MAX_ROWS_IN_MEMORY // rows))}
