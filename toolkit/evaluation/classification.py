"""The metrics of classes and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.data.labels import Labels

# eval.jsonl would hold classes x classes numbers a line; predictions.jsonl has them all anyway
MOST_CONFUSABLE = 100


def classification_metrics(logits: np.ndarray, truth: np.ndarray, labels: Labels) -> dict[str, Any]:
    """(N, C) logits and (N,) or (N, C) labels -> the numbers of eval.jsonl, computed once, from every sample.

    For classes: accuracy, F1 (macro, micro, weighted), each class's own numbers and the confusion matrix; for
    regression: mean squared and absolute error and Pearson's correlation, of several outputs their means.
    """
    from sklearn import metrics as sk  # a second's import, and only the main process computes

    if labels.problem_type == "regression":
        return _of_outputs(logits, truth.reshape(logits.shape), labels)
    classes = list(range(labels.size))
    single = labels.problem_type == "single_label_classification"
    guess = logits.argmax(axis=1) if single else (logits > 0).astype(int)
    truth = truth if single else truth.astype(int)
    numbers: dict[str, Any] = {"accuracy": float(sk.accuracy_score(truth, guess))}
    for average in ("macro", "micro", "weighted"):
        numbers[f"f1_{average}"] = float(sk.f1_score(truth, guess, labels=classes, average=average, zero_division=0))
    precision, recall, f1, support = sk.precision_recall_fscore_support(
        truth, guess, labels=classes, average=None, zero_division=0
    )
    numbers["per_class"] = {
        name: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(s)}
        for name, p, r, f, s in zip(labels.names, precision, recall, f1, support, strict=True)
    }
    if single and labels.size <= MOST_CONFUSABLE:
        numbers["confusion_matrix"] = sk.confusion_matrix(truth, guess, labels=classes).tolist()
    return numbers


def _of_outputs(guess: np.ndarray, truth: np.ndarray, labels: Labels) -> dict[str, Any]:
    """(N, C) numbers -> the means over the outputs, and each output's numbers where there are several."""
    each = {name: _of_numbers(guess[:, place], truth[:, place]) for place, name in enumerate(labels.names)}
    means = {name: float(np.mean([numbers[name] for numbers in each.values()])) for name in ("mse", "mae", "pearson")}
    return means | ({"per_output": each} if len(each) > 1 else {})


def _of_numbers(guess: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    from scipy.stats import pearsonr
    from sklearn import metrics as sk

    varied = len(truth) > 1 and np.ptp(truth) > 0 and np.ptp(guess) > 0
    return {
        "mse": float(sk.mean_squared_error(truth, guess)),
        "mae": float(sk.mean_absolute_error(truth, guess)),
        # without variation there is no correlation to speak of
        "pearson": float(pearsonr(truth, guess).statistic) if varied else 0.0,
    }
