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

from toolkit.data.labels import MULTI
from toolkit.data.tokens import Split
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.outputs import Evaluation
from toolkit.report.files import dumps, write_atomically
from toolkit.report.statistics import class_scores, intervals

FILE = "baselines.json"
LARGEST, LINEAR, MODEL = "largest class", "tf-idf + logistic regression", "this model"
_MAX_ROWS, _MAX_ROWS_TIMES_CLASSES, _MAX_CLASSES, _ITERATIONS = 20_000, 200_000, 200, 40
"""So that the linear model takes seconds on one core."""
_MAX_WEIGHTS = 10**6
"""Weights of the linear model, which uses the most frequent features."""


def write_baselines(
    folder: Path, train: Split | None, split: Split, logits: np.ndarray, answers: ClassAnswers
) -> list[str]:
    """Writes `folder`/baselines.json and returns the lines to print; as `baselines`."""
    content = baselines(train, split, logits, answers)
    if content:
        rows = {"num_samples": len(split), "train": len(train) if train else 0}
        about = {"split": split.name, **rows}
        write_atomically(folder / FILE, [dumps(about | content, indent=2), "\n"])
    return describe(content)


def read_baselines(folder: Path, last: Evaluation) -> dict[str, Any] | None:
    """The content of baselines.json; None if it is not of this evaluation."""
    if not (folder / FILE).is_file():
        return None
    content = dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    evaluated = (last.split, last.numbers.get("num_samples"))
    return content if (content["split"], content["num_samples"]) == evaluated else None


def baselines(
    train: Split | None, split: Split, logits: np.ndarray, answers: ClassAnswers
) -> dict[str, Any]:
    """`models`: name -> metric -> value, low, high; `trained_on`: training rows of the linear
    model.

    `logits`: (N, C), the model's for `split`. Without `train` the model alone is evaluated; {} for
    regression.
    """
    labels = answers.labels
    if labels.problem_type == "regression":
        return {}
    multi = labels.problem_type == MULTI
    guesses: dict[str, np.ndarray] = {}  # (N, C) bool
    trained_on = 0
    if train is not None:
        truth = _one_hot(train.labels, labels.size, multi)
        counts = truth.sum(axis=0)
        largest = counts > len(train) / 2 if multi else np.arange(labels.size) == counts.argmax()
        guesses[LARGEST] = np.broadcast_to(largest, (len(split), labels.size))
        rows = _sample(train, labels.size)
        if labels.size <= _MAX_CLASSES and len(np.unique(truth[rows], axis=0)) > 1:
            trained_on = len(rows)
            guesses[LINEAR] = _one_hot(_linear(train, rows, split), labels.size, multi)
    adjusted = answers.adjust_logits(logits)
    guesses[MODEL] = _one_hot(adjusted > 0 if multi else adjusted.argmax(1), labels.size, multi)
    truth = _one_hot(split.labels, labels.size, multi)
    scores = {
        name: class_scores(truth, each, labels.problem_type) for name, each in guesses.items()
    }
    models = {name: intervals(each) for name, each in scores.items()}
    return {"models": models, "trained_on": trained_on}


def _one_hot(classes: np.ndarray, size: int, multi: bool) -> np.ndarray:
    """(N,) classes, or (N, C) labels -> (N, C) bool."""
    return classes > 0.5 if multi else classes[:, None] == np.arange(size)


def describe(content: dict[str, Any]) -> list[str]:
    """Lines to print: F1 (macro) of each model, and a warning if the linear one is about as
    good."""
    values = {name: metrics["f1_macro"] for name, metrics in content.get("models", {}).items()}
    if not values:
        return []
    texts = []
    for name, value in values.items():
        texts.append("{} {value:.4f} ({low:.4f} to {high:.4f})".format(name, **value))
    lines = [f"f1_macro, 95 % confidence interval: {', '.join(texts)}"]
    model, linear = values[MODEL], values.get(LINEAR)
    if linear and model["low"] <= linear["value"] and model["value"] < 1:
        remedy = "check its settings, or evaluate on more rows"
        lines.append(f"  the model is not clearly better than {LINEAR}: {remedy}")
    return lines


def _sample(train: Split, classes: int) -> np.ndarray:
    """The training rows of the linear model: all, or a random sample within the limits."""
    most = min(len(train), _MAX_ROWS, max(1000, _MAX_ROWS_TIMES_CLASSES // classes))
    return np.sort(np.random.default_rng(0).choice(len(train), most, replace=False))


def _linear(train: Split, rows: np.ndarray, split: Split) -> np.ndarray:
    """Predictions for the rows of the split: (N,) classes, or (N, C) labels."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    truth = train.labels[rows].astype(int)
    model: Any = LogisticRegression(C=10, max_iter=_ITERATIONS)
    classes = truth.max() + 1
    if truth.ndim == 2:
        model = OneVsRestClassifier(model)
        classes = truth.shape[1]
    features = _MAX_WEIGHTS // max(20, classes)
    weighting = TfidfVectorizer(
        lowercase=False, tokenizer=str.split, token_pattern=None, ngram_range=(1, 2),
        max_features=features, sublinear_tf=True,
    )  # fmt: skip
    with warnings.catch_warnings():  # about few iterations, and labels without rows
        warnings.simplefilter("ignore")
        model.fit(weighting.fit_transform(_texts(train, rows)), truth)
    predicted = model.predict(weighting.transform(_texts(split, np.arange(len(split)))))
    # of a single label sklearn returns (N,)
    return np.asarray(predicted).reshape(split.labels.shape)


def _texts(split: Split, rows: np.ndarray) -> Iterator[str]:
    """The token ids of each row as words."""
    for row in rows.tolist():
        yield " ".join(map(str, split.tokens(row).tolist()))
