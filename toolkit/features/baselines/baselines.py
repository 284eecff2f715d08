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
    folder: Path, train: Split | None, split: Split, logits: np.ndarray, answers: ClassAnswers
) -> list[str]:
    """Writes `folder`/baselines.json and returns the lines to print; as `baselines`."""
    if answers.labels.problem_type == REGRESSION:
        return []
    models = baselines(train, split, logits, answers)
    content = {"split": split.name, "num_samples": len(split), "models": models}
    write_atomically(folder / FILE, [dumps(content, indent=2), "\n"])
    return describe(models)


def read_baselines(folder: Path, last: Evaluation) -> dict[str, Any] | None:
    """The content of baselines.json; None if it is not of this evaluation."""
    if not (folder / FILE).is_file():
        return None
    content = dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    if content["split"] != last.split or content["num_samples"] != last.numbers["num_samples"]:
        return None
    return content


def baselines(
    train: Split | None, split: Split, logits: np.ndarray, answers: ClassAnswers
) -> dict[str, Any]:
    """Model -> metric -> value, low, high. `logits`: (N, C), the model's for `split`. Without
    `train` the model alone is evaluated."""
    labels = answers.labels
    size = labels.size
    guesses: dict[str, np.ndarray] = {}  # (N, C) bool
    if train is not None:
        counts = _one_hot(train.labels, size).sum(axis=0)
        largest = np.arange(size) == counts.argmax()
        if labels.problem_type == MULTI:
            largest = counts > len(train) / 2
        guesses[LARGEST] = np.broadcast_to(largest, (len(split), size))
        most = min(len(train), _MAX_ROWS, _MAX_ROWS_TIMES_CLASSES // size)
        rows = np.sort(np.random.default_rng(0).choice(len(train), most, replace=False))
        if size <= _MAX_CLASSES and len(np.unique(train.labels[rows])) > 1:
            guesses[LINEAR] = _one_hot(_linear(train, rows, split, size), size)
    scores = answers.adjust_logits(logits)
    guesses[MODEL] = scores > 0
    if labels.problem_type != MULTI:
        guesses[MODEL] = _one_hot(scores.argmax(axis=1), size)
    truth = _one_hot(split.labels, size)
    return {
        name: intervals(class_scores(truth, guess, labels.problem_type))
        for name, guess in guesses.items()
    }


def _one_hot(labels: np.ndarray, size: int) -> np.ndarray:
    """(N,) classes, or (N, C) labels -> (N, C) bool."""
    if labels.ndim == 2:
        return labels > 0.5
    return labels[:, None] == np.arange(size)


def describe(models: dict[str, Any]) -> list[str]:
    """Lines to print: F1 (macro) of each model, and a warning if the linear one is about as
    good."""
    values = {name: metrics["f1_macro"] for name, metrics in models.items()}
    texts = []
    for name, value in values.items():
        texts.append("{} {value:.4f} ({low:.4f} to {high:.4f})".format(name, **value))
    lines = [f"f1_macro, 95 % confidence interval: {', '.join(texts)}"]
    model, linear = values[MODEL], values.get(LINEAR)
    if linear and model["low"] <= linear["value"] and model["value"] < 1:
        remedy = "check its settings, or evaluate on more rows"
        lines.append(f"  the model is not clearly better than {LINEAR}: {remedy}")
    return lines


def _linear(train: Split, rows: np.ndarray, split: Split, size: int) -> np.ndarray:
    """Predictions for the split, (N,) classes or (N, C) labels, of a model that is trained on these
    rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    model: Any = LogisticRegression(C=10, max_iter=_ITERATIONS)
    if train.labels.ndim == 2:
        model = OneVsRestClassifier(model)
    weighting = TfidfVectorizer(
        lowercase=False, tokenizer=str.split, token_pattern=None, ngram_range=(1, 2),
        max_features=_MAX_WEIGHTS // max(20, size), sublinear_tf=True,
    )  # fmt: skip
    with warnings.catch_warnings():  # about few iterations, and labels without rows
        warnings.simplefilter("ignore")
        features = weighting.fit_transform(_texts(train, rows))
        model.fit(features, train.labels[rows].astype(int))
    predicted = model.predict(weighting.transform(_texts(split, np.arange(len(split)))))
    return predicted.reshape(split.labels.shape)  # of a single label sklearn returns (N,)


def _texts(split: Split, rows: np.ndarray) -> Iterator[str]:
    """The token ids of each row as words."""
    for row in rows.tolist():
        yield " ".join(map(str, split.tokens(row).tolist()))
