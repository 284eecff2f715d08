"""R-Drop (Liang et al., 2021): the distance between two forward passes with different dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from toolkit.config import ProblemType
from toolkit.errors import UserError
from toolkit.objective.losses import Batch, Objective


def with_r_drop(
    objective: Objective, model: Any, problem_type: ProblemType, alpha: float
) -> Objective:
    """The mean of the objective over both passes + alpha x their divergence."""
    if problem_type == "regression":
        raise UserError(
            f"--r_drop_alpha {alpha} needs classes, and this is a regression: leave it out"
        )

    def losses(batch: Batch, logits: Tensor) -> Tensor:
        first = objective(batch, logits)
        second_logits = model(**batch.inputs).logits  # (B, C), with another dropout
        mean = (first + objective(batch, second_logits)) / 2
        return mean + alpha * divergence(logits, second_logits, problem_type)

    return replace(objective, training=losses)


def divergence(one: Tensor, other: Tensor, problem_type: ProblemType) -> Tensor:
    """(B, C) logits of two passes -> (B,): the mean of both Kullback-Leibler divergences, for
    multi-label its mean over labels."""
    one = one.float()
    other = other.float()
    if problem_type == "multi_label_classification":
        return ((one.sigmoid() - other.sigmoid()) * (one - other)).mean(-1) / 2
    p = one.log_softmax(-1)
    q = other.log_softmax(-1)
    return ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2
