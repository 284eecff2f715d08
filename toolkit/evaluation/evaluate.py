"""The evaluation of a classifier in training, for recipes that do not show it in the open, as recipes/cls.py does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.config import TrainingSettings
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.answers import classification_evaluation
from toolkit.evaluation.classification import classification_metrics
from toolkit.evaluation.outputs import Evaluation, Outputs, evaluation_batches
from toolkit.objective.base import Losses


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
