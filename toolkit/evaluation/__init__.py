"""Prediction of every sample exactly once, and the metrics of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit.config import Task, TrainingSettings
from toolkit.data.batches import Collator
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.answers import prediction_lines
from toolkit.evaluation.metrics import best_metric, compute
from toolkit.evaluation.predict import predict

__all__ = ["Best", "Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: the numbers everywhere, the predictions on the main process."""

    split: str
    numbers: dict[str, Any]
    predictions: Callable[[], Iterator[dict[str, Any]]] | None
    """Makes the lines of predictions.jsonl."""


def evaluate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    split: Split,
    tokenizer: Any,
    labels: Labels,
    settings: TrainingSettings,
) -> Evaluation:
    """Predicts a split exactly once; every process gets the numbers, so that all decide alike."""
    collate = Collator(split, tokenizer, accelerator.device)
    batch_size = settings.per_device_eval_batch_size or 2 * settings.per_device_batch_size
    predictions = predict(accelerator, model, split, collate, batch_size, settings.max_tokens_per_batch)
    numbers = [compute(predictions, labels) if predictions is not None else None]
    lines = partial(prediction_lines, predictions, labels) if predictions is not None else None
    return Evaluation(split.name, broadcast_object_list(numbers)[0], lines)


class Best:
    """The best evaluation so far, and how long ago it was."""

    def __init__(self, metric: str | None, problem_type: Task, patience: int | None = None) -> None:
        """`patience`: evaluations without a better one after which training stops. Raises UserError for a
        metric that eval.jsonl does not hold."""
        self.patience = patience or math.inf
        self.metric, greater_is_better = best_metric(metric, problem_type)
        self.sign = 1.0 if greater_is_better else -1.0
        self.forget()

    def forget(self) -> None:
        """As before the first evaluation."""
        self.value = -math.inf
        self.step = 0
        self.waited = 0
        """Evaluations since the best one."""

    def improved(self, evaluation: Evaluation, step: int) -> bool:
        """Takes note of an evaluation; True when it is better than all before it."""
        value = self.sign * evaluation.numbers[self.metric]
        if value > self.value:
            self.value, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    @property
    def gives_up(self) -> bool:
        """Whether there has been no better evaluation for so long that training stops."""
        return self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        """For a checkpoint: JSON."""
        value = None if math.isinf(self.value) else self.value
        return {"metric": self.metric, "value": value, "step": self.step, "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state; anew where that was of another metric."""
        if state["metric"] == self.metric and state["value"] is not None:
            self.value, self.step, self.waited = state["value"], state["step"], state["waited"]
