"""How sure a metric is, and whether one run is better than another: the bootstrap over rows, and McNemar's test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse, stats
from sklearn.preprocessing import MultiLabelBinarizer

_RESAMPLES, _FEWEST, _MOST_DRAWS = 1000, 100, 10**8
_BATCH = 50
"""Resamples that are in memory together."""


class Scores(NamedTuple):
    """What the metrics of one run's predictions are computed from."""

    rows: Any
    """(N, F) sparse: what each row adds to F sums."""
    metrics: Callable[[np.ndarray, int], dict[str, np.ndarray]]
    """(R, F) sums over N rows -> each metric (R,)."""
    right: np.ndarray | None = None
    """(N,) bool: for classes, whether the whole prediction of the row is right."""

    @property
    def values(self) -> dict[str, float]:
        """The metrics of all rows, each counted once."""
        metrics = self.metrics(np.asarray(self.rows.sum(axis=0)).reshape(1, -1), self.rows.shape[0])
        return {name: float(value[0]) for name, value in metrics.items()}


def scores_of(lines: Sequence[dict[str, Any]], problem_type: str, classes: Sequence[str]) -> Scores:
    """The scores of the lines of predictions.jsonl."""
    if problem_type == "title_generation":
        names = sorted(lines[0]["scores"])
        return _means(names, [[line["scores"][name] for name in names] for line in lines])
    if problem_type == "regression":
        errors = np.array([np.subtract(line["prediction"], line["label"]) for line in lines]).reshape(len(lines), -1)
        return _means(("mae", "mse"), np.stack([np.abs(errors).mean(axis=1), np.square(errors).mean(axis=1)], axis=1))
    binarizer = MultiLabelBinarizer(classes=classes, sparse_output=True)

    def label_sets(key: str) -> Any:
        labels = (line[key] for line in lines)  # a name, None where the model abstained, or a list of names
        return binarizer.fit_transform([[x] if isinstance(x, str) else x or [] for x in labels])

    return class_scores(label_sets("label"), label_sets("prediction"), problem_type)


def class_scores(truth: Any, guess: Any, problem_type: str) -> Scores:
    """The scores of two sparse (N, C) of ones: the labels of each row, and the predicted ones."""
    truth, guess = sparse.csr_array(truth, dtype=np.float64), sparse.csr_array(guess, dtype=np.float64)
    right = np.asarray(abs(truth - guess).sum(axis=1)).ravel() == 0

    def metrics(sums: np.ndarray, count: int) -> dict[str, np.ndarray]:
        hits, true, guessed = np.split(sums[:, 1:], 3, axis=1)  # (R, C) each
        values = {"accuracy": sums[:, 0] / count, "f1_macro": (2 * hits / np.maximum(true + guessed, 1)).mean(axis=1)}
        if problem_type == "multi_label_classification":
            values["f1_micro"] = 2 * hits.sum(axis=1) / np.maximum((true + guessed).sum(axis=1), 1)
        return values

    columns = [sparse.csr_array(right[:, None].astype(float)), truth.multiply(guess), truth, guess]
    return Scores(sparse.hstack(columns, format="csr"), metrics, right)


def _means(names: Sequence[str], rows: Any) -> Scores:
    return Scores(
        sparse.csr_array(np.array(rows, np.float64)),
        lambda sums, count: {name: sums[:, column] / count for column, name in enumerate(names)},
    )


def resampled(runs: Sequence[Scores], seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Each run's metrics (R,) in resamples of the rows, drawn with replacement; the same ones for all runs, so that
    differences between runs are paired (Efron and Tibshirani 1993). 1,000 of them, fewer above 100,000 rows."""
    count = runs[0].rows.shape[0]
    if count == 1:  # of which scipy makes no resamples: they are all the same
        return [{name: np.array([value]) for name, value in run.values.items()} for run in runs]

    def metrics(rows: np.ndarray, axis: int) -> np.ndarray:
        """(B, N) numbers of rows -> (all metrics of all runs, B)."""
        weights = np.stack([np.bincount(sample, minlength=count) for sample in rows], axis=1).astype(float)  # (N, B)
        return np.stack([v for run in runs for v in run.metrics((run.rows.T @ weights).T, count).values()])

    resamples = max(_FEWEST, min(_RESAMPLES, _MOST_DRAWS // count))
    drawn = iter(
        stats.bootstrap(
            (np.arange(count),), metrics, n_resamples=resamples, batch=_BATCH, vectorized=True, method="percentile",
            rng=seed,
        ).bootstrap_distribution
    )  # fmt: skip
    return [{name: next(drawn) for name in run.values} for run in runs]


def interval(values: np.ndarray) -> dict[str, float]:
    """The middle 95 %."""
    low, high = np.quantile(values, [0.025, 0.975]).tolist()
    return {"low": low, "high": high}


def paired_p(differences: np.ndarray) -> float:
    """Two-sided p of a paired bootstrap: how often the difference is not on its side of 0."""
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    return min(1.0, 2 * float(beyond + 1) / (len(differences) + 1))


def mcnemar(one: np.ndarray, other: np.ndarray) -> float:
    """Exact two-sided p for two models' (N,) right answers on the same rows (McNemar 1947)."""
    only_one, only_other = int((one & ~other).sum()), int((other & ~one).sum())
    return float(stats.binomtest(only_one, only_one + only_other).pvalue) if only_one + only_other else 1.0
