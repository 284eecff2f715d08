"""The metrics of classification and regression, by scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.data.labels import Labels

# above it the confusion matrix would bloat each line of eval.jsonl; predictions.jsonl has the same
# facts
_MAX_CONFUSION_CLASSES = 100


def classification_metrics(
    logits: np.ndarray, truth: np.ndarray, labels: Labels
) -> dict[str, Any]:
    """(N, C) logits and (N,) or (N, C) labels -> the numbers of eval.jsonl, over all samples.

    Classification: accuracy, F1 (macro, weighted, of several labels micro), precision, recall and
    F1 of each class, the confusion matrix. Regression: mean squared error, mean absolute error and
    Pearson correlation, averaged over the outputs.
    """
    if labels.problem_type == "regression":
        truth = truth.reshape(logits.shape)
        return _regression_metrics(
            logits.astype(np.float64), truth.astype(np.float64), labels
        )
    from sklearn import metrics as sk  # takes a second, and only the main process computes

    classes = list(range(labels.size))
    is_single = labels.problem_type == "single_label_classification"
    if is_single:
        guess = logits.argmax(axis=1)
    else:
        guess = (logits > 0).astype(int)
        truth = truth.astype(int)
    report: Any = sk.classification_report(
        truth, guess, labels=classes, output_dict=True, zero_division=0
    )
    averages = ["macro", "micro", "weighted"]
    if is_single:
        averages.remove("micro")  # it would equal the accuracy
    numbers: dict[str, Any] = {"accuracy": float(sk.accuracy_score(truth, guess))}
    for average in averages:
        numbers[f"f1_{average}"] = float(report[f"{average} avg"]["f1-score"])
    numbers["per_class"] = {
        name: _class_numbers(report[str(index)]) for index, name in enumerate(labels.names)
    }
    if is_single and labels.size <= _MAX_CONFUSION_CLASSES:
        numbers["confusion_matrix"] = sk.confusion_matrix(
            truth, guess, labels=classes
        ).tolist()
    return numbers


def _class_numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "precision": float(line["precision"]),
        "recall": float(line["recall"]),
        "f1": float(line["f1-score"]),
        "support": int(line["support"]),
    }


def _regression_metrics(
    guess: np.ndarray, truth: np.ndarray, labels: Labels
) -> dict[str, Any]:
    """(N, C) numbers -> means over the outputs, and `per_output` if there are several."""
    per_output = {
        name: _output_numbers(guess[:, place], truth[:, place])
        for place, name in enumerate(labels.names)
    }
    each = list(per_output.values())
    numbers: dict[str, Any] = {
        name: float(np.mean([output[name] for output in each])) for name in each[0]
    }
    if len(each) > 1:
        numbers["per_output"] = per_output
    return numbers


def _output_numbers(guess: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Of one output, (N,) each. The correlation of a constant is undefined: 0."""
    from scipy.stats import pearsonr

    varies = np.ptp(truth) > 0 and np.ptp(guess) > 0
    return {
        "mse": float(np.square(guess - truth).mean()),
        "mae": float(np.abs(guess - truth).mean()),
        "pearson": float(pearsonr(truth, guess).statistic) if varies else 0.0,
    }
