"""Accuracy and F1, with 95 % confidence intervals, of the model and of baselines that take seconds without a GPU.

The baselines are the largest class, and logistic regression on tf-idf of the model's tokens and token bigrams, with its
truncation. They are trained on the training rows and evaluated on the rows of the last evaluation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from toolkit.data.labels import MULTI, Labels
from toolkit.data.prepare import Prepared
from toolkit.data.tokens import Split
from toolkit.errors import first_line
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.outputs import Evaluation
from toolkit.report.comparison import class_scores, intervals
from toolkit.report.files import dumps, write_atomically

FILE = "baselines.json"
LARGEST, LINEAR, MODEL = "largest class", "tf-idf + logistic regression", "this model"
_MAX_WORK = 10**7
"""Training features times classes, a few seconds on one core; above it a sample of the rows is trained on."""
_MAX_ROWS, _MAX_CLASSES, _HASHED, _ITERATIONS = 50_000, 200, 1 << 20, 40
_MAX_WEIGHTS = 10**6
"""Weights of the linear model, which uses the most frequent features."""


def write_baselines(
    folder: Path, data: Prepared | None, outputs: tuple[Split, np.ndarray], answers: ClassAnswers
) -> list[str]:
    """Writes `folder`/baselines.json and returns the lines to print. `outputs`: (split, its logits (N, C)); no
    baseline is trained without `data`."""
    (folder / FILE).unlink(missing_ok=True)
    split, train = outputs[0], data.train if data else None
    try:
        content = baselines(train, *outputs, answers)
    except (MemoryError, ValueError) as error:  # must not fail the run
        return [f"not compared with simple models: {first_line(error)}"]
    if content:
        about = {
            "split": split.name,
            "num_samples": len(split),
            "train": len(train) if train else 0,
        }
        write_atomically(folder / FILE, [dumps(about | content, indent=2), "\n"])
    return describe(content)


def read_baselines(folder: Path, last: Evaluation) -> dict[str, Any] | None:
    """The content of baselines.json; None if it is not of this evaluation."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        same = (content["split"], content["num_samples"]) == (
            last.split,
            last.numbers.get("num_samples"),
        )
        return dict(content) if same and content["models"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def baselines(
    train: Split | None, split: Split, logits: np.ndarray, answers: ClassAnswers
) -> dict[str, Any]:
    """`models`: name -> metric -> value, low, high; `trained_on`: training rows of the linear model.

    `logits`: (N, C), the model's for `split`. Without `train` the model alone is evaluated; {} for regression.
    """
    labels, trained_on = answers.labels, 0
    if labels.problem_type == "regression" or not len(split):
        return {}
    multi = labels.problem_type == MULTI
    guesses: dict[str, np.ndarray] = {}  # (N,) classes, or (N, C) truth values
    if train is not None:
        counts = (
            (train.labels > 0.5).sum(axis=0)
            if multi
            else np.bincount(train.labels, minlength=labels.size)
        )
        largest = counts > len(train) / 2 if multi else counts.argmax()
        guesses[LARGEST] = np.broadcast_to(largest, split.labels.shape)
        rows = _sample(train, labels)
        if labels.size <= _MAX_CLASSES and len(np.unique(train.labels[rows], axis=0)) > 1:
            trained_on = len(rows)
            guesses[LINEAR] = _linear(train, rows, split, multi)
    adjusted = answers.adjust_logits(logits)
    guesses[MODEL] = adjusted > 0 if multi else adjusted.argmax(axis=1)

    def one_hot(classes: np.ndarray) -> Any:
        places = (
            np.nonzero(classes > 0.5) if multi else (np.arange(len(classes)), classes.astype(int))
        )
        return sparse.csr_array((np.ones(len(places[0])), places), shape=(len(split), labels.size))

    truth = one_hot(split.labels)
    scores = {
        name: class_scores(truth, one_hot(guess), labels.problem_type)
        for name, guess in guesses.items()
    }
    return {
        "models": {name: intervals(each) for name, each in scores.items()},
        "trained_on": trained_on,
    }


def describe(content: dict[str, Any]) -> list[str]:
    """Lines to print: F1 (macro) of each model, and a warning if the linear one is about as good."""
    values = {name: metrics["f1_macro"] for name, metrics in content.get("models", {}).items()}
    if not values:
        return []
    texts = [
        "{} {value:.4f} ({low:.4f} to {high:.4f})".format(name, **value)
        for name, value in values.items()
    ]
    lines = [f"f1_macro, 95 % confidence interval: {', '.join(texts)}"]
    if (
        LINEAR in values
        and values[MODEL]["low"] <= values[LINEAR]["value"]
        and values[MODEL]["value"] < 1
    ):
        lines.append(
            f"  the model is not clearly better than {LINEAR}: check its settings, or evaluate on more rows"
        )
    return lines


def _sample(train: Split, labels: Labels) -> np.ndarray:
    """The training rows of the linear model: all, or a random sample within the limits."""
    each = 2 * max(1.0, len(train.input_ids) / len(train)) * labels.size
    most = int(min(_MAX_ROWS, max(_MAX_WORK / each, 1000)))
    return np.sort(
        np.random.default_rng(0).choice(len(train), min(len(train), most), replace=False)
    )


def _linear(train: Split, rows: np.ndarray, split: Split, multi: bool) -> np.ndarray:
    """Predictions for the rows of the split: (N,) classes, or (N, C) bool."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    model: Any = LogisticRegression(C=10, max_iter=_ITERATIONS)
    weighting = TfidfTransformer(sublinear_tf=True)
    with warnings.catch_warnings():  # about few iterations, and labels without rows
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", UserWarning)
        counts, truth = _counts(train, rows), train.labels[rows].astype(int)
        frequency = np.bincount(counts.indices, minlength=counts.shape[1])
        most = min(
            _MAX_WEIGHTS // 20, _MAX_WEIGHTS // (truth.shape[1] if multi else truth.max() + 1)
        )
        features = np.sort(np.argsort(-frequency, kind="stable")[:most])
        model = OneVsRestClassifier(model) if multi else model
        model.fit(weighting.fit_transform(counts[:, features]), truth)
        predicted = [
            model.predict(weighting.transform(_counts(split, part)[:, features]))
            for part in np.array_split(np.arange(len(split)), -(-len(split) // _MAX_ROWS))
        ]
    return np.concatenate(predicted).reshape(
        split.labels.shape
    )  # of a single label sklearn returns (N,)


def _counts(split: Split, rows: np.ndarray) -> Any:
    """(rows, 2 x features) sparse: counts of tokens and of hashed token bigrams."""
    tokens = [split.tokens(int(row)).astype(np.int64) for row in rows]
    ids, row = np.concatenate(tokens), np.repeat(np.arange(len(rows)), [len(ids) for ids in tokens])
    inside = row[1:] == row[:-1]
    pairs = (ids[:-1] * 1_000_003 + ids[1:])[inside] % _HASHED + _HASHED
    columns, rows_of = (
        np.concatenate([ids % _HASHED, pairs]),
        np.concatenate([row, row[1:][inside]]),
    )
    return sparse.csr_array(
        (np.ones(len(columns), np.float32), (rows_of, columns)), shape=(len(rows), 2 * _HASHED)
    )
