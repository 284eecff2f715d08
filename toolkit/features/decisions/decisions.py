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

from toolkit.data.labels import Labels
from toolkit.demo import model_path
from toolkit.errors import UserError, listing
from toolkit.evaluation.answers import DECISIONS, ClassAnswers
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation
from toolkit.features.decisions.calibration import TEMPERATURES, calibration_error
from toolkit.utils.files import as_json


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

    def temperature_and_offsets(self) -> tuple[float, np.ndarray]:
        thresholds = np.array(
            [self.thresholds.get(name, 0.5) for name in self.labels.names]
        )
        return self.temperature, np.log(thresholds / (1 - thresholds)).astype(np.float32)

    def abstains(self, probability: float) -> bool:
        return self.abstain_below is not None and probability < self.abstain_below

    def as_json(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "thresholds": dict(self.thresholds),
            "abstain_below": self.abstain_below,
        }

    def evaluation(
        self, evaluation: Evaluation, compute_metrics: ComputeMetrics
    ) -> Evaluation:
        """Replaces metrics and predictions by those of these decisions; on the main process.

        Adds `decisions`: metrics and calibration error without (`before`) and with them (`after`),
        how many rows are `answered`, and the `accuracy_of_answered`.
        """
        if evaluation.outputs is None:
            return evaluation
        split, logits = evaluation.outputs
        truth = split.labels
        metrics = as_json(compute_metrics(self.adjust_logits(logits), truth))
        after = {name: value for name, value in metrics.items() if isinstance(value, float)}
        before = {name: evaluation.numbers[name] for name in after}
        undecided = super().probabilities(logits)
        effect = {
            **self.as_json(),
            "before": before | calibration_error(undecided, truth),
            "after": after | calibration_error(self.probabilities(logits), truth),
        }
        if self.abstain_below is not None:
            effect |= self._answered(logits, truth)
        lines = partial(self.prediction_lines, split.rows, logits, truth)
        numbers = evaluation.numbers | metrics | {"decisions": effect}
        return replace(evaluation, numbers=numbers, predictions=lines)

    def _answered(self, logits: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
        """How many rows have an answer, and how many of these are right."""
        answers = self.adjust_logits(logits).argmax(axis=1)
        confidence = self.probabilities(logits)[np.arange(len(answers)), answers]
        answered = confidence >= self.abstain_below
        accuracy = None
        if answered.any():
            accuracy = float((answers == truth)[answered].mean())
        return {"answered": int(answered.sum()), "accuracy_of_answered": accuracy}

    def describe(self, evaluation: Evaluation) -> list[str]:
        """The effect of the decisions, as lines to print."""
        effect = evaluation.numbers["decisions"]
        changes = []
        for name, before in effect["before"].items():
            changes.append(f"{name} {before:.4f} -> {effect['after'][name]:.4f}")
        lines = [f"decisions, on {evaluation.split}: {', '.join(changes)}"]
        if self.abstain_below is not None:
            answered = f"{effect['answered']} of {evaluation.numbers['num_samples']} rows"
            accuracy = effect["accuracy_of_answered"]
            lines.append(
                f"  {answered} have an answer; the accuracy of these is {accuracy}"
            )
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
        model_path(model),
        DECISIONS,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    try:
        file = _File.model_validate_json(Path(path).read_bytes())
        if file.labels != list(labels.names):
            raise UserError(
                f"it is for {listing(file.labels)}, not {listing(labels.names)}"
            )
        unknown = file.thresholds.keys() - labels.names
        if unknown:
            raise UserError(f"thresholds of unknown labels: {listing(unknown)}")
    except (ValidationError, UserError) as error:
        remedy = "repeat the run's command, or remove it to answer with the likeliest class"
        raise UserError(f"{path}: {' '.join(str(error).split())}: {remedy}") from error
    return Decisions(labels, file.temperature, file.thresholds, file.abstain_below)
