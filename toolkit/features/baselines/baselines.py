"""Accuracy and F1, with 95 % confidence intervals, of the model and of baselines that take seconds
without a GPU.

The baselines are the largest class, and logistic regression on tf-idf of the model's tokens and
token bigrams, with its truncation. They are trained on the training rows and evaluated on the rows
of the last evaluation.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.labels import MULTI, REGRESSION
from toolkit.data.tokens import Split
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.outputs import Evaluation
from toolkit.report.files import dumps, write_atomically
from toolkit.report.statistics import class_scores, intervals

FILE = "baselines.json"
LARGEST, LINEAR, MODEL = "largest class", "tf-idf + logistic regression", "this model"
# so that the linear model takes seconds on one core
_MAX_ROWS = 20_000
_MAX_ROWS_TIMES_CLASSES = 200_000
_MAX_CLASSES = 200
_MAX_WEIGHTS = 10**6
_ITERATIONS = 40


def write_baselines(
    folder: Path,
    train: Split | None,
    split: Split,
    logits: np.ndarray,
    answers: ClassAnswers,
) -> list[str]:
    """Writes `folder`/baselines.json and returns the lines to print; as `baselines`."""
    if answers.labels.problem_type == REGRESSION:
        return []
    models = baselines(train, split, logits, answers)
    content = {"split": split.name, "num_samples": len(split), "models": models}
    write_atomically(folder / FILE, [dumps(content, indent=2), "\n"])
    lines = []
    for name, metrics in models.items():
        values = []
        for metric, value in metrics.items():
            values.append(
                "{} {value:.4f} (95 %: {low:.4f}-{high:.4f})".format(metric, **value)
            )
        lines.append(f"  {'  '.join(values)}  {name}")
    if train is not None and answers.labels.size > _MAX_CLASSES:
        reason = f"there are more than {_MAX_CLASSES} classes"
        lines.append(f"  {LINEAR} is left out: {reason}")
    return [*lines, *doubts(models)]


def read_baselines(folder: Path, last: Evaluation) -> dict[str, Any] | None:
    """The content of baselines.json; None if it is not of this evaluation."""
    if not (folder / FILE).is_file():
        return None
    content = dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    if (
        content["split"] != last.split
        or content["num_samples"] != last.numbers["num_samples"]
    ):
        return None
    return content


def baselines(
    train: Split | None, split: Split, logits: np.ndarray, answers: ClassAnswers
) -> dict[str, Any]:
    """Model -> metric -> value, low, high. `logits`: (N, C), the model's for `split`. Without
    `train` the model alone is evaluated."""
    labels = answers.labels
    guesses: dict[str, np.ndarray] = {}  # as `split.labels`
    if train is not None:
        guesses = _simple_models(train, split, labels.size)
    scores = answers.adjust_logits(logits)
    guesses[MODEL] = scores > 0 if labels.problem_type == MULTI else scores.argmax(axis=1)
    truth = _one_hot(split.labels, labels.size)
    models = {}
    for name, guess in guesses.items():
        # of a single label scikit-learn returns (N,)
        one_hot = _one_hot(guess.reshape(split.labels.shape), labels.size)
        models[name] = intervals(class_scores(truth, one_hot, labels.problem_type))
    return models


def _one_hot(labels: np.ndarray, size: int) -> np.ndarray:
    """(N,) classes, or (N, C) labels -> (N, C) bool."""
    if labels.ndim == 2:
        return labels > 0.5
    return labels[:, None] == np.arange(size)


def doubts(models: dict[str, Any]) -> list[str]:
    """A line if the linear model has about as good an F1 (macro)."""
    if LINEAR not in models:
        return []
    linear, model = models[LINEAR]["f1_macro"], models[MODEL]["f1_macro"]
    if linear["value"] < model["low"] or model["value"] == 1:
        return []
    remedy = "check its settings, or evaluate on more rows"
    return [f"the model is not clearly better than {LINEAR}: {remedy}"]


def _simple_models(train: Split, split: Split, size: int) -> dict[str, np.ndarray]:
    """Model -> predictions for the split."""
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    truth = train.labels.astype(int)
    largest = DummyClassifier().fit(truth, truth)  # it does not look at its inputs
    guesses = {LARGEST: largest.predict(split.labels)}
    count = min(len(train), _MAX_ROWS, _MAX_ROWS_TIMES_CLASSES // size)
    rows = np.sort(np.random.default_rng(0).choice(len(train), count, replace=False))
    if size > _MAX_CLASSES or len(np.unique(truth[rows])) < 2:
        return guesses
    linear: Any = LogisticRegression(C=10, max_iter=_ITERATIONS)
    if truth.ndim == 2:
        linear = OneVsRestClassifier(linear)
    weighting = TfidfVectorizer(
        token_pattern=r"\d+",
        ngram_range=(1, 2),
        max_features=_MAX_WEIGHTS // max(20, size),
        sublinear_tf=True,
    )
    # about few iterations, and labels without rows
    with warnings.catch_warnings(action="ignore"):
        linear.fit(weighting.fit_transform(_texts(train, rows)), truth[rows])
    features = weighting.transform(_texts(split, np.arange(len(split))))
    return {**guesses, LINEAR: linear.predict(features)}


def _texts(split: Split, rows: np.ndarray) -> Iterator[str]:
    """The token ids of each row as words."""
    for row in rows.tolist():
        yield " ".join(map(str, split.tokens(row).tolist()))
