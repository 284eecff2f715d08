"""How sure a metric is, and whether one run is better than another: the bootstrap over rows, and McNemar's test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.stats import binomtest

_RESAMPLES, _FEWEST, _MOST_DRAWS = 1000, 100, 10**8
_AT_ONCE = 50


class Scores(NamedTuple):
    """What the metrics of one run's predictions are made of."""

    rows: Any
    """(N, F) sparse: what each row adds to F sums."""
    metrics: Callable[[np.ndarray, int], dict[str, np.ndarray]]
    """(R, F) sums over N rows -> each metric (R,)."""
    right: np.ndarray | None = None
    """(N,) bool: for classes, whether all of the row is right."""

    @property
    def values(self) -> dict[str, float]:
        """Of all rows, each once."""
        found = self.metrics(np.asarray(self.rows.sum(axis=0)).reshape(1, -1), self.rows.shape[0])
        return {name: float(value[0]) for name, value in found.items()}


def scores_of(lines: Sequence[dict[str, Any]], problem_type: str, classes: Sequence[str]) -> Scores:
    """Of the lines of predictions.jsonl."""
    if problem_type == "title_generation":
        names = sorted(lines[0]["scores"])
        return _means(names, [[line["scores"][name] for name in names] for line in lines])
    if problem_type == "regression":
        off = np.array([np.subtract(line["prediction"], line["label"]) for line in lines]).reshape(len(lines), -1)
        return _means(("mae", "mse"), np.stack([np.abs(off).mean(axis=1), np.square(off).mean(axis=1)], axis=1))
    truth, guess = (_sets([line[own] for line in lines], classes) for own in ("label", "prediction"))
    right = np.array([line["label"] == line["prediction"] for line in lines])
    single = problem_type == "single_label_classification"

    def metrics(sums: np.ndarray, count: int) -> dict[str, np.ndarray]:
        hits, true, guessed = np.split(sums[:, 1:], 3, axis=1)  # (R, C) each
        f1 = 2 * hits / np.maximum(true + guessed, 1)
        micro = {} if single else {"f1_micro": 2 * hits.sum(axis=1) / np.maximum((true + guessed).sum(axis=1), 1)}
        return {"accuracy": sums[:, 0] / count, "f1_macro": f1.mean(axis=1), **micro}

    columns = [sparse.csr_array(right[:, None].astype(float)), truth.multiply(guess), truth, guess]
    return Scores(sparse.hstack(columns, format="csr"), metrics, right)


def _means(names: Sequence[str], rows: Any) -> Scores:
    return Scores(
        sparse.csr_array(np.array(rows, np.float64)),
        lambda sums, count: {name: sums[:, place] / count for place, name in enumerate(names)},
    )


def _sets(labels: Sequence[str | list[str] | None], classes: Sequence[str]) -> Any:
    """Names, lists of them, or no answer -> (N, C) sparse, of ones."""
    place = {name: index for index, name in enumerate(classes)}
    pairs = [
        (row, place[name]) for row, own in enumerate(labels) for name in ([own] if isinstance(own, str) else own or ())
    ]
    rows, columns = zip(*pairs, strict=True) if pairs else ((), ())
    return sparse.csr_array((np.ones(len(pairs)), (rows, columns)), shape=(len(labels), len(classes)))


def resampled(runs: Sequence[Scores], seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Each run's metrics (R,) in resamples of the rows, drawn with replacement; the same ones for all runs, so that
    differences between runs are paired (Efron and Tibshirani 1993). 1,000 of them, fewer above 100,000 rows."""
    count = runs[0].rows.shape[0]
    left = max(_FEWEST, min(_RESAMPLES, _MOST_DRAWS // count))
    generator = np.random.default_rng(seed)
    sums: list[list[np.ndarray]] = [[] for _ in runs]
    while left > 0:
        draws = [generator.integers(0, count, count) for _ in range(min(left, _AT_ONCE))]
        weights = np.stack([np.bincount(drawn, minlength=count) for drawn in draws], axis=1).astype(float)  # (N, R)
        for own, run in zip(sums, runs, strict=True):
            own.append((run.rows.T @ weights).T)
        left -= len(draws)
    return [run.metrics(np.concatenate(own), count) for own, run in zip(sums, runs, strict=True)]


def interval(values: np.ndarray) -> dict[str, float]:
    """The middle 95 %."""
    low, high = np.quantile(values, [0.025, 0.975]).tolist()
    return {"low": low, "high": high}


def chance(differences: np.ndarray) -> float:
    """Two-sided p of a paired bootstrap: how often the difference is not on its side of 0."""
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    return min(1.0, 2 * float(beyond + 1) / (len(differences) + 1))


def mcnemar(one: np.ndarray, other: np.ndarray) -> float:
    """Exact two-sided p for two models' (N,) right answers on the same rows (McNemar 1947)."""
    only_one, only_other = int((one & ~other).sum()), int((other & ~one).sum())
    return float(binomtest(only_one, only_one + only_other).pvalue) if only_one + only_other else 1.0
