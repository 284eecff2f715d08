"""Numbers for eval.jsonl, computed once, on the main process, from every sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from toolkit.config import ProblemType, Task
from toolkit.data.labels import Labels
from toolkit.errors import UserError, did_you_mean
from toolkit.evaluation.predict import Predictions
from toolkit.models.loss import sample_losses

_AVERAGES = ("macro", "micro", "weighted")
NUMBERS: dict[Task, tuple[str, ...]] = {
    "single_label_classification": ("loss", "accuracy", *(f"f1_{average}" for average in _AVERAGES)),
    "multi_label_classification": ("loss", "accuracy", *(f"f1_{average}" for average in _AVERAGES)),
    "regression": ("loss", "mse", "mae", "pearson"),
    "title_generation": ("loss", "rouge1", "rouge2", "rougeL"),
}
_BEST: dict[Task, str] = {
    "single_label_classification": "f1_macro",
    "multi_label_classification": "f1_micro",
    "regression": "loss",
    "title_generation": "rougeL",
}
# eval.jsonl would hold classes x classes numbers a line; predictions.jsonl has them all anyway
MOST_CONFUSABLE = 100
_LOWER_IS_BETTER = ("loss", "mse", "mae")


def best_metric(wanted: str | None, problem_type: Task) -> tuple[str, bool]:
    """(name, whether greater is better). Raises UserError for a name eval.jsonl does not hold."""
    name = (wanted or _BEST[problem_type]).removeprefix("eval_")
    if name not in NUMBERS[problem_type]:
        known = NUMBERS[problem_type]
        raise UserError(
            f"--metric_for_best_model {wanted}{did_you_mean(name, known)}: {problem_type} has {', '.join(known)}"
        )
    return name, name not in _LOWER_IS_BETTER


def probabilities_of(logits: np.ndarray, problem_type: ProblemType) -> np.ndarray:
    """(N, C) logits -> (N, C) float32: softmax, or a sigmoid per class; regression keeps its numbers."""
    tensor = torch.from_numpy(logits)
    if problem_type == "single_label_classification":
        return tensor.softmax(dim=-1).numpy()
    return tensor.sigmoid().numpy() if problem_type == "multi_label_classification" else logits


def compute(predictions: Predictions, labels: Labels) -> dict[str, Any]:
    """The numbers of one evaluation; for classes also each class's own and the confusion matrix."""
    from sklearn import metrics as sk  # a second's import, and only the main process computes

    losses = sample_losses(
        torch.from_numpy(predictions.logits),
        torch.from_numpy(np.asarray(predictions.labels)),
        labels.problem_type,
    )
    numbers: dict[str, Any] = {"num_samples": len(predictions.ids), "loss": float(losses.double().mean())}
    if labels.problem_type == "regression":
        return numbers | _of_numbers(predictions.logits[:, 0], predictions.labels)
    if labels.problem_type == "single_label_classification":
        truth, guess = predictions.labels, predictions.logits.argmax(axis=1)
        kinds: list[int] = list(range(labels.size))
    else:
        truth, guess = predictions.labels.astype(int), (predictions.logits > 0).astype(int)
        kinds = list(range(labels.size))
    numbers["accuracy"] = float(sk.accuracy_score(truth, guess))
    for average in _AVERAGES:
        numbers[f"f1_{average}"] = float(sk.f1_score(truth, guess, labels=kinds, average=average, zero_division=0))
    precision, recall, f1, support = sk.precision_recall_fscore_support(
        truth, guess, labels=kinds, average=None, zero_division=0
    )
    numbers["per_class"] = {
        name: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(s)}
        for name, p, r, f, s in zip(labels.names, precision, recall, f1, support, strict=True)
    }
    if labels.problem_type == "single_label_classification" and labels.size <= MOST_CONFUSABLE:
        numbers["confusion_matrix"] = sk.confusion_matrix(truth, guess, labels=kinds).tolist()
    return numbers


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
