"""`Objective`, the losses of the labels, to which optional terms are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

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
        return self.training(batch, logits) if self.training else self.losses(logits, batch.labels)

    def plus(self, term: Term) -> Objective:
        """This objective plus `term(batch, logits)`, (B,)."""
        return replace(self, training=lambda batch, logits: self(batch, logits) + term(batch, logits))
