"""Classes and numbers: the metrics of an evaluation, and its predictions as a reader wants them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from toolkit.config import TrainingSettings
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, Outputs, evaluation_batches
from toolkit.features.decisions.decisions import Decisions, brought, readable
from toolkit.objective.base import Losses

# eval.jsonl would hold classes x classes numbers a line; predictions.jsonl has them all anyway
MOST_CONFUSABLE = 100


def classification_evaluation(outputs: Outputs, labels: Labels, compute_metrics: ComputeMetrics) -> Evaluation:
    """The evaluation of gathered logits (N, C) and losses (N,); every process gets the numbers."""
    split = outputs.split
    if not (arrays := outputs.in_order()):
        return outputs.evaluation()
    logits, losses = arrays
    lines = partial(prediction_lines, split.rows, logits, split.labels, Decisions(labels))
    return outputs.evaluation(losses, compute_metrics(logits, split.labels), lines, logits)


@torch.no_grad()
def evaluate_classifier(
    accelerator: Accelerator, model: Any, split: Split, tokenizer: Any, settings: TrainingSettings, losses: Losses,
    labels: Labels,
) -> Evaluation:  # fmt: skip
    """An evaluation of a split with a prepared classifier, each sample exactly once; all processes call this."""
    model.eval()
    outputs = Outputs(accelerator, split)
    for batch in evaluation_batches(accelerator, split, tokenizer, settings):
        logits = model(**batch.inputs).logits.float()  # (B, C)
        outputs.add(accelerator.gather_for_metrics(batch.padded(logits, losses(logits, batch.labels))))
    return classification_evaluation(outputs, labels, partial(classification_metrics, labels=labels))


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
    """(N, C) numbers -> what they have on average, and each output's own where there are several."""
    own = {name: _of_numbers(guess[:, place], truth[:, place]) for place, name in enumerate(labels.names)}
    means = {name: float(np.mean([numbers[name] for numbers in own.values()])) for name in ("mse", "mae", "pearson")}
    return means | ({"per_output": own} if len(own) > 1 else {})


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


def prediction_lines(
    rows: np.ndarray, logits: np.ndarray, truth: np.ndarray, decisions: Decisions
) -> Iterator[dict[str, Any]]:
    """id (row in the source, from 0), label, prediction, probabilities (in the order of the classes)."""
    for row, label, answer in zip(rows, truth, decisions.answers(logits), strict=True):
        yield {"id": int(row), "label": readable(label, decisions.labels), **answer}


def decided_evaluation(evaluation: Evaluation, decisions: Decisions, compute_metrics: ComputeMetrics) -> Evaluation:
    """The same evaluation with numbers and predictions by these decisions; on the main process."""
    if evaluation.outputs is None:
        return evaluation
    split, logits = evaluation.outputs
    more = brought(evaluation.single_numbers, logits, split.labels, decisions, compute_metrics)
    lines = partial(prediction_lines, split.rows, logits, split.labels, decisions)
    return replace(evaluation, numbers=evaluation.numbers | more, predictions=lines)
