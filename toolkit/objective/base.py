"""`Objective`, the losses of the labels, which optional terms wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Batch = Any
"""A micro-batch: `Batch` in toolkit/data/batches.py, which nothing here imports."""
Losses = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) -> (B,) losses, one per sample."""


class Objective:
    """The losses of the labels. An optional term is a subclass that wraps another objective."""

    def __init__(self, losses: Losses) -> None:
        self.losses = losses

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        """A micro-batch and its logits -> (B,) training losses."""
        return self.losses(logits, batch.labels)

    def plus(self, term: Callable[[Batch, Tensor], Tensor]) -> Objective:
        """This objective plus `term(batch, logits)`, (B,)."""
        return _Sum(self, term)


class _Sum(Objective):
    def __init__(self, objective: Objective, term: Callable[[Batch, Tensor], Tensor]) -> None:
        super().__init__(objective.losses)
        self.objective, self.term = objective, term

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        return self.objective(batch, logits) + self.term(batch, logits)
