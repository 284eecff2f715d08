"""What one evaluation found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list

from toolkit.data.tokens import Split
from toolkit.evaluation.outputs import Outputs

ComputeMetrics = Callable[[Any, Any], dict[str, Any]]
"""(outputs, what is true) of all samples -> names and numbers, as transformers' Trainer calls it: logits (N, C) and
labels (N,) or (N, C); of titles, two lists of texts. It runs on the main process only."""
Lines = Callable[[], Iterator[dict[str, Any]]]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: the numbers everywhere, the predictions on the main process."""

    split: str
    numbers: dict[str, Any]
    """`num_samples`, `loss` and what the recipe's metrics are."""
    predictions: Lines | None
    """Makes the lines of predictions.jsonl."""


def evaluation_of(
    outputs: Outputs, numbers_of: Callable[[list[np.ndarray]], tuple[np.ndarray, dict[str, Any], Lines]]
) -> Evaluation:
    """Checks that each sample is there once, and computes the numbers on the main process; all must call it.

    `numbers_of` turns the gathered outputs, (N, ...) each, into (losses (N,), the metrics, the prediction lines).
    """
    arrays, numbers, lines = outputs.in_order(), {}, None
    if outputs.accelerator.is_main_process:
        losses, metrics, lines = numbers_of(arrays)
        numbers = {"num_samples": len(outputs.split), "loss": mean_loss(losses, outputs.split), **metrics}
    return Evaluation(outputs.split.name, broadcast_object_list([numbers])[0], lines)


def mean_loss(losses: np.ndarray, split: Split) -> float:
    """(N,) losses -> their sum over the split's loss denominator, as a training step has it."""
    return float(losses.sum(dtype=np.float64) / split.loss_denominators.sum())
