"""Tunes temperature and thresholds on the validation rows, and saves them with the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit

from toolkit.data.labels import MULTI, Labels
from toolkit.data.tokens import Split
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.evaluation.answers import DECISIONS
from toolkit.evaluation.outputs import Evaluation
from toolkit.features.decisions.calibration import fit_temperature
from toolkit.features.decisions.decisions import Decisions
from toolkit.report.files import write_atomically

if TYPE_CHECKING:
    from toolkit.features.decisions.feature import DecisionSettings

_FEW_ROWS = 10


def check(settings: DecisionSettings, labels: Labels) -> None:
    """Raises UserError for settings that do not fit the labels."""
    single = labels.problem_type == "single_label_classification"
    several = labels.problem_type == MULTI
    two_classes = single and labels.size == 2
    has = f"not for {labels.problem_type} with {labels.size} labels"
    if settings.tune_thresholds and not (several or two_classes):
        raise UserError(f"--tune_thresholds is for two classes or several labels, {has}")
    if settings.calibrate and not (single or several):
        raise UserError(f"--calibrate is for classes, {has}")
    if settings.abstain_below is not None and not single:
        raise UserError(f"--abstain_below is for one class per text, {has}")
    positive = settings.positive_class
    if positive is not None and not (two_classes and positive in labels.names):
        near = did_you_mean(positive, labels.names)
        names = listing(labels.names)
        raise UserError(
            f"--positive_class {positive}{near}: name one of two classes: {names}"
        )


def tune_and_save(
    run: Any,
    settings: DecisionSettings,
    evaluate: Callable[[Split], Evaluation],
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
        "step": run.best.step,  # a conversion of other weights does not copy the file
    }
    write_atomically(path, [json.dumps(content, ensure_ascii=False, indent=2), "\n"])
    run.answers = decisions
    for line in notes:
        run.say(line)


def tune(
    settings: DecisionSettings,
    labels: Labels,
    validation: Evaluation,
) -> tuple[Decisions, list[str]]:
    """(the tuned decisions, warnings of thresholds from few rows). Raises UserError for an
    evaluation without logits."""
    if validation.outputs is None:
        names = "--tune_thresholds, --calibrate and --abstain_below"
        raise UserError(f"{names} need the logits of an evaluation: drop these settings")
    split, logits = validation.outputs
    temperature = 1.0
    if settings.calibrate:
        temperature = fit_temperature(logits, split.labels)
    thresholds: dict[str, float] = {}
    notes: list[str] = []
    if settings.tune_thresholds:
        # in float64, so that a threshold fits between any two scores
        scaled = logits.astype(np.float64) / temperature
        for name, scores, truth in _binary(settings, labels, scaled, split.labels):
            thresholds[name] = best_threshold(
                truth, expit(scores), settings.tune_thresholds
            )
            with_it = truth.sum()
            if min(with_it, len(truth) - with_it) < _FEW_ROWS:
                why = f"fewer than {_FEW_ROWS} validation rows are with or without it"
                notes.append(f"the threshold of {name} is unreliable: {why}")
    return Decisions(labels, temperature, thresholds, settings.abstain_below), notes


def _binary(
    settings: DecisionSettings,
    labels: Labels,
    logits: np.ndarray,
    truth: np.ndarray,
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(label, its logit (N,), whether the rows have it (N,)) of each label with a threshold: of two
    classes of one, whose sigmoid of the difference is its softmax."""
    if labels.problem_type == MULTI:
        for place, name in enumerate(labels.names):
            yield name, logits[:, place], truth[:, place] > 0.5
        return
    name = settings.positive_class or labels.names[1]
    place = labels.names.index(name)
    yield name, logits[:, place] - logits[:, 1 - place], truth == place


def best_threshold(truth: np.ndarray, probabilities: np.ndarray, criterion: str) -> float:
    """The best threshold on (N,) probabilities for (N,) bool, midway between two of them; 0.5 if
    all rows have the same label. `criterion`: as `--tune_thresholds`."""
    from sklearn.metrics import precision_recall_curve

    if truth.all() or not truth.any():
        return 0.5
    # of the rows with at least each score, ascending; the last entry is of no rows
    precision, recall, scores = precision_recall_curve(truth, probabilities)
    precision, recall = precision[:-1], recall[:-1]
    kind, _, least = criterion.partition("=")
    if kind == "f1":
        quality = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    else:
        quality = np.where(recall >= float(least) - 1e-9, precision, -1)
    best = int(quality.argmax())
    below = scores[best - 1] if best else 0.0
    return float(np.clip((below + scores[best]) / 2, 1e-6, 1 - 1e-6))
