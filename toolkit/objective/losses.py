"""Losses per sample, whose mean is taken over the global batch; `Objective`, to which optional
terms are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.config import ProblemType

Batch = Any
"""A micro-batch: `Batch` in toolkit/data/batches.py, which nothing here imports."""
Losses = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) -> (B,) losses, one per sample."""
Term = Callable[[Batch, Tensor], Tensor]
"""(micro-batch, its logits) -> (B,)."""


@dataclass(frozen=True)
class Objective:
    """The losses of the labels, and the training losses, by default the same."""

    losses: Losses
    training: Term | None = None

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        """A micro-batch and its logits -> (B,) training losses."""
        return (
            self.training(batch, logits)
            if self.training
            else self.losses(logits, batch.labels)
        )

    def plus(self, term: Term) -> Objective:
        """This objective plus `term(batch, logits)`, (B,)."""
        return replace(
            self, training=lambda batch, logits: self(batch, logits) + term(batch, logits)
        )


def sample_losses(
    logits: Tensor,
    labels: Tensor,
    problem_type: ProblemType,
    label_smoothing: float = 0.0,
    focal_gamma: float | None = None,
    pos_weight: Tensor | None = None,
) -> Tensor:
    """(B, C) logits and labels -> (B,) float32 losses.

    As in transformers, without its mean over the batch: cross entropy for (B,) class ids, the mean
    over classes of binary cross entropy for (B, C) 0/1 rows, squared errors for (B,) numbers, their
    mean over outputs for (B, C).

    `focal_gamma` multiplies each cross entropy by (1 - p)^gamma, p the probability of the label
    (Lin et al., 2017, "Focal Loss"). `pos_weight` (C,), on the logits' device, multiplies the loss
    of a 1, as in `torch.nn.BCEWithLogitsLoss`.
    """
    logits = logits.float()
    if problem_type == "single_label_classification":
        losses = F.cross_entropy(
            logits, labels, reduction="none", label_smoothing=label_smoothing
        )
        return losses if focal_gamma is None else _focal(losses, focal_gamma)
    if problem_type == "multi_label_classification":
        # (B, C)
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        if focal_gamma is not None:
            losses = _focal(losses, focal_gamma)
        if pos_weight is not None:
            losses = losses * (1 + (pos_weight - 1) * labels)
        return losses.mean(dim=-1)
    squares = (logits - labels.reshape(logits.shape)).square()
    return squares.mean(dim=-1)


def _focal(losses: Tensor, gamma: float) -> Tensor:
    """Multiplies cross entropies by (1 - p)^gamma, p = exp(-loss). Clamped, since a root has no
    derivative at 0."""
    return losses * (-torch.expm1(-losses)).clamp(min=1e-9) ** gamma


def token_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """(B, T, V) logits and (B, T) token ids -> (B,) float32 sums of cross entropies; labels of -100
    are padding."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1),
        labels.flatten(),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view(labels.shape).sum(dim=1)
