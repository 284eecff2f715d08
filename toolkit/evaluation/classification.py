"""Metrics of classification and regression."""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.data.labels import Labels

# above it the confusion matrix would bloat each line of eval.jsonl; predictions.jsonl has the same facts
_MAX_CONFUSION_CLASSES = 100


def classification_metrics(logits: np.ndarray, truth: np.ndarray, labels: Labels) -> dict[str, Any]:
    """(N, C) logits and (N,) or (N, C) labels -> the numbers of eval.jsonl, over all samples.

    Classification: accuracy, F1 (macro, micro, weighted), precision, recall and F1 of each class, the confusion matrix.
    Regression: mean squared error, mean absolute error and Pearson correlation, averaged over the outputs.
    """
    from sklearn import metrics as sk  # takes a second to import, and only the main process computes

    if labels.problem_type == "regression":
        return _regression_metrics(logits.astype(np.float64), truth.reshape(logits.shape).astype(np.float64), labels)
    classes = list(range(labels.size))
    single = labels.problem_type == "single_label_classification"
    guess = logits.argmax(axis=1) if single else (logits > 0).astype(int)
    truth = truth if single else truth.astype(int)
    report: Any = sk.classification_report(truth, guess, labels=classes, output_dict=True, zero_division=0)
    numbers: dict[str, Any] = {"accuracy": float(sk.accuracy_score(truth, guess))}
    for average in ("macro", "micro", "weighted"):  # with a single label the micro F1 equals the accuracy
        numbers[f"f1_{average}"] = float(report.get(f"{average} avg", {"f1-score": numbers["accuracy"]})["f1-score"])
    numbers["per_class"] = {
        name: {"precision": float(line["precision"]), "recall": float(line["recall"]), "f1": float(line["f1-score"]),
               "support": int(line["support"])}
        for name, line in zip(labels.names, map(report.__getitem__, map(str, classes)), strict=True)
    }  # fmt: skip
    if single and labels.size <= _MAX_CONFUSION_CLASSES:
        numbers["confusion_matrix"] = sk.confusion_matrix(truth, guess, labels=classes).tolist()
    return numbers


def _regression_metrics(guess: np.ndarray, truth: np.ndarray, labels: Labels) -> dict[str, Any]:
    """(N, C) numbers -> means over the outputs, and `per_output` where there are several."""
    from scipy.stats import pearsonr
    from sklearn import metrics as sk

    varied = (np.ptp(truth, axis=0) > 0) & (np.ptp(guess, axis=0) > 0)  # the correlation of a constant is undefined
    columns = {
        "mse": sk.mean_squared_error(truth, guess, multioutput="raw_values"),
        "mae": sk.mean_absolute_error(truth, guess, multioutput="raw_values"),
        "pearson": [
            pearsonr(*pair).statistic if vary else 0.0 for *pair, vary in zip(truth.T, guess.T, varied, strict=True)
        ],
    }
    means = {name: float(np.mean(column)) for name, column in columns.items()}
    each = {label: {name: float(column[place]) for name, column in columns.items()}
            for place, label in enumerate(labels.names)}  # fmt: skip
    return means | ({"per_output": each} if len(each) > 1 else {})
