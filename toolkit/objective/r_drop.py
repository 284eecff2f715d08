"""R-Drop (Liang et al., 2021): adds the divergence of two forward passes with different dropout."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from toolkit.config import ProblemType
from toolkit.errors import UserError
from toolkit.objective.base import Batch, Objective


class RDrop(Objective):
    """The mean of the objective over both passes + alpha x their divergence."""

    def __init__(self, objective: Objective, model: Any, problem_type: ProblemType, alpha: float) -> None:
        super().__init__(objective.losses)
        self.objective, self.model, self.problem_type, self.alpha = objective, model, problem_type, alpha
        if problem_type == "regression":
            raise UserError(f"--r_drop_alpha {alpha} needs classes, and this is a regression: leave it out")

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        losses = self.objective(batch, logits)
        second = self.model(**batch.inputs).logits  # (B, C), with another dropout
        losses = (losses + self.objective(batch, second)) / 2
        return losses + self.alpha * divergence(logits, second, self.problem_type)


def divergence(one: Tensor, other: Tensor, problem_type: ProblemType) -> Tensor:
    """(B, C) logits of two passes -> (B,): the mean of both Kullback-Leibler divergences, for multi-label its mean over
    labels."""
    one, other = one.float(), other.float()
    if problem_type == "multi_label_classification":
        return ((one.sigmoid() - other.sigmoid()) * (one - other)).mean(-1) / 2
    p, q = F.log_softmax(one, -1), F.log_softmax(other, -1)
    return ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2
