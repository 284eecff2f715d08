"""How probabilities become answers: a temperature, thresholds, and when there is no answer.

Tuned on the validation rows with the best model (`tune`), and saved next to its weights in
decisions.json, which all that loads the model applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError
from transformers.utils import cached_file

from toolkit.data.labels import MULTI, Labels
from toolkit.demo import model_path
from toolkit.errors import UserError, listing
from toolkit.evaluation.answers import DECISIONS, ClassAnswers
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation
from toolkit.features.decisions.effect import calibration_error
from toolkit.utils.files import as_json

TEMPERATURES = (0.05, 20.0)
_DESCRIBED = ("accuracy", "f1_macro", "f1_micro", "ece", "brier")


@dataclass(frozen=True)
class Decisions(ClassAnswers):
    """The answers of a classifier after a temperature and thresholds."""

    temperature: float = 1.0
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Label -> threshold on its probability, after the temperature; of two classes, of one."""
    abstain_below: float | None = None
    """The answer is None if its probability is lower."""

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        return super().probabilities(logits / np.float32(self.temperature))

    def adjust_logits(self, logits: np.ndarray) -> np.ndarray:
        thresholds = np.array([self.thresholds.get(name, 0.5) for name in self.labels.names])
        offsets = np.log(thresholds / (1 - thresholds)).astype(np.float32)  # (C,)
        return logits / np.float32(self.temperature) - offsets

    def abstains(self, probability: float) -> bool:
        return self.abstain_below is not None and probability < self.abstain_below

    @property
    def no_answer_reason(self) -> str:  # type: ignore[override]
        limit = f"{self.abstain_below:g}, the abstain_below of the model's decisions.json"
        return f"their probabilities are below {limit}"

    def as_json(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "thresholds": dict(self.thresholds),
            "abstain_below": self.abstain_below,
        }

    def evaluation(self, evaluation: Evaluation, compute_metrics: ComputeMetrics) -> Evaluation:
        """Replaces metrics and predictions by those of these decisions; on the main process.

        Adds `decisions`: metrics and calibration error without (`before`) and with them (`after`),
        how many rows are `answered`, and the `accuracy_of_answered`.
        """
        if evaluation.outputs is None:
            return evaluation
        split, logits = evaluation.outputs
        truth = split.labels
        metrics = as_json(compute_metrics(self.adjust_logits(logits), truth))
        plain = evaluation.single_numbers.keys() & metrics.keys()
        before = {name: evaluation.numbers[name] for name in metrics if name in plain}
        after = {name: metrics[name] for name in before}
        effect = self.as_json()
        undecided = ClassAnswers(self.labels).probabilities(logits)
        effect["before"] = before | calibration_error(undecided, truth)
        effect["after"] = after | calibration_error(self.probabilities(logits), truth)
        if self.abstain_below is not None:
            effect |= self._answered(logits, truth)
        lines = partial(self.prediction_lines, split.rows, logits, truth)
        numbers = evaluation.numbers | metrics | {"decisions": effect}
        return replace(evaluation, numbers=numbers, predictions=lines)

    def _answered(self, logits: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
        answers = self.adjust_logits(logits).argmax(axis=1)
        confidence = self.probabilities(logits)[np.arange(len(answers)), answers]
        answered = confidence >= self.abstain_below
        accuracy = None
        if answered.any():
            accuracy = float((answers == truth)[answered].mean())
        return {"answered": int(answered.sum()), "accuracy_of_answered": accuracy}

    def describe(self, evaluation: Evaluation) -> list[str]:
        effect = evaluation.numbers.get("decisions")
        if effect is None:
            return []
        before, after = effect["before"], effect["after"]
        names = [name for name in _DESCRIBED if name in before]
        changes = [f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in names]
        lines = [f"decisions, on {evaluation.split}: {', '.join(changes)}"]
        if self.abstain_below is not None and effect["answered"]:
            answered = f"{effect['answered']} of {evaluation.numbers['num_samples']} rows"
            right = 100 * effect["accuracy_of_answered"]
            lines.append(f"  {answered} have an answer, of which {right:.1f} % are right")
        return lines


_Share = Annotated[float, Field(gt=0, lt=1)]


class _File(BaseModel):
    """decisions.json."""

    labels: list[str]
    temperature: float = Field(default=1.0, ge=TEMPERATURES[0], le=TEMPERATURES[1])
    thresholds: dict[str, _Share] = {}
    abstain_below: _Share | None = None


def saved_decisions(model: str, labels: Labels) -> Decisions | None:
    """Reads decisions.json of a model's folder, or of a name on the hub; None if there is none.

    Raises UserError for a file that is damaged or does not fit the labels.
    """
    # None for a file that is not there, of a folder or on the hub, also without a network
    path = cached_file(
        model_path(model), DECISIONS,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    if path is None:
        return None
    remedy = f"repeat the run's command, or remove {path} to answer with the likeliest class"
    try:
        file = _File.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg']}: {remedy}") from error
    decisions = Decisions(labels, file.temperature, file.thresholds, file.abstain_below)
    fault = _fault(decisions, file.labels)
    if fault:
        raise UserError(f"{path}: {fault}: {remedy}")
    return decisions


def _fault(decisions: Decisions, names: list[str]) -> str:
    """Why the decisions, of a model with these labels, are not for the labels; "" if they are."""
    labels = decisions.labels
    several = labels.problem_type == MULTI
    if names != list(labels.names):
        return f"it belongs to a model with other labels than {listing(labels.names)}"
    if labels.problem_type == "regression":
        return "regression has no decisions"
    with_threshold = labels.names if several or labels.size == 2 else ()
    wrong = [name for name in decisions.thresholds if name not in with_threshold]
    if wrong:
        return f"thresholds of {listing(wrong)}, which cannot have one"
    if several and decisions.abstain_below is not None:
        return "several labels per text have no abstain_below"
    return ""
