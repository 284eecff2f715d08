"""Tunes temperature and thresholds on the validation rows, and saves them with the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.data.labels import MULTI, Labels
from toolkit.data.tokens import Split
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.evaluation.answers import DECISIONS
from toolkit.evaluation.outputs import Evaluation
from toolkit.features.decisions.decisions import TEMPERATURES, Decisions
from toolkit.report.files import write_atomically

if TYPE_CHECKING:
    from toolkit.features.decisions.feature import DecisionSettings

_FEW_ROWS = 10


def check(settings: DecisionSettings, labels: Labels) -> None:
    """Raises UserError for settings that do not fit the labels."""
    kind = f"{labels.problem_type} with {labels.size} labels"
    single = labels.problem_type == "single_label_classification"
    two = single and labels.size == 2
    several = labels.problem_type == MULTI
    if settings.tune_thresholds and not (two or several):
        raise UserError(f"--tune_thresholds is for two classes or several labels, not {kind}")
    if settings.calibrate and not (single or several):
        raise UserError(f"--calibrate is for classes, not {kind}")
    if settings.abstain_below is not None and not single:
        raise UserError(f"--abstain_below is for one class per text, not {kind}")
    positive = settings.positive_class
    if positive is not None and not (two and positive in labels.names):
        near = did_you_mean(positive, labels.names)
        names = listing(labels.names)
        raise UserError(f"--positive_class {positive}{near}: name one of two classes: {names}")


def tune_and_save(
    run: Any, settings: DecisionSettings, evaluate: Callable[[Split], Evaluation]
) -> None:
    """Tunes on the best model's evaluation of the validation rows, writes decisions.json next to
    its weights, and sets `run.answers`. A collective."""
    path = run.folder.model / DECISIONS
    validation = None
    if settings.any:
        validation = run.best_evaluation(run.data.validation, evaluate)
    if not run.accelerator.is_main_process:
        return
    path.unlink(missing_ok=True)  # written with other settings
    if validation is None:
        return
    decisions, notes = tune(settings, run.data.labels, validation)
    content = {
        "labels": list(run.data.labels.names),
        **decisions.as_json(),
        "requested": vars(settings),
        "step": run.best.step,  # a conversion of other weights does not copy the file
    }
    write_atomically(path, [json.dumps(content, ensure_ascii=False, indent=2), "\n"])
    run.answers = decisions
    for line in notes:
        run.say(line)


def tune(
    settings: DecisionSettings, labels: Labels, validation: Evaluation
) -> tuple[Decisions, list[str]]:
    """(the tuned decisions, warnings). Raises UserError for an evaluation without logits."""
    if validation.outputs is None:
        names = "--tune_thresholds, --calibrate and --abstain_below"
        raise UserError(f"{names} need the logits of an evaluation: drop these settings")
    split, logits = validation.outputs
    truth = split.labels
    notes: list[str] = []
    temperature = 1.0
    if settings.calibrate:
        temperature = fit_temperature(logits, truth)
    thresholds: dict[str, float] = {}
    if settings.tune_thresholds:
        # in float64, so that a threshold fits between any two scores
        scaled = logits.astype(np.float64) / temperature
        for name, score, is_name in _binary(settings, scaled, truth, labels):
            probabilities = 1 / (1 + np.exp(-score))
            thresholds[name] = best_threshold(is_name, probabilities, settings.tune_thresholds)
            if min(is_name.sum(), (~is_name).sum()) < _FEW_ROWS:
                why = f"fewer than {_FEW_ROWS} validation rows are with or without it"
                notes.append(f"the threshold of {name} is unreliable: {why}")
    return Decisions(labels, temperature, thresholds, settings.abstain_below), notes


def _binary(
    settings: DecisionSettings, logits: np.ndarray, truth: np.ndarray, labels: Labels
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(label, its logit (N,), whether the rows have it (N,)) of each label with a threshold."""
    if labels.problem_type == MULTI:
        columns = enumerate(labels.names)
        return [(name, logits[:, place], truth[:, place] > 0.5) for place, name in columns]
    name = settings.positive_class or labels.names[1]
    place = labels.names.index(name)
    return [(name, logits[:, place] - logits[:, 1 - place], truth == place)]


def fit_temperature(logits: np.ndarray, truth: np.ndarray) -> float:
    """The T that minimises the negative log likelihood of softmax(logits / T), or of the sigmoid
    (Guo et al., 2017); 1 without mistakes, of which there would be none to learn from."""
    from scipy.optimize import minimize_scalar

    scores = torch.tensor(logits, dtype=torch.float64)
    target = torch.tensor(truth)
    answers = scores > 0 if truth.ndim == 2 else scores.argmax(dim=1)
    if bool((answers == target).all()):
        return 1.0
    compute_loss: Any = F.cross_entropy
    if truth.ndim == 2:
        compute_loss = F.binary_cross_entropy_with_logits
        target = target.double()

    def loss(log_temperature: float) -> float:
        return float(compute_loss(scores / np.exp(log_temperature), target))

    result = minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded")
    return float(np.exp(result.x))


def best_threshold(truth: np.ndarray, probabilities: np.ndarray, criterion: str) -> float:
    """The best threshold on (N,) probabilities for (N,) bool, midway between two of them; 0.5 if
    all rows have the same label. `criterion`: as `--tune_thresholds`."""
    from sklearn.metrics import roc_curve

    positives = int(truth.sum())
    negatives = len(truth) - positives
    if not positives or not negatives:
        return 0.5
    false_rate, recall, scores = roc_curve(truth, probabilities, drop_intermediate=False)
    hits = recall * positives
    alarms = false_rate * negatives
    kind, _, value = criterion.partition("=")
    if kind == "f1":
        quality = 2 * hits / (hits + alarms + positives)
    elif kind == "cost":
        alarm_cost, miss_cost = map(float, value.split(":"))
        quality = -(alarm_cost * alarms + miss_cost * (positives - hits))
    else:
        precision = hits / np.maximum(hits + alarms, 1)
        quality = np.where(recall >= float(value) - 1e-9, precision, -1)
    best = int(quality.argmax())
    lowest_positive = min(scores[best], 1.0)
    highest_negative = scores[best + 1] if best + 1 < len(scores) else 0.0
    return float(np.clip((lowest_positive + highest_negative) / 2, 1e-6, 1 - 1e-6))
