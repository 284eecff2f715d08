"""Terms for the distance to other outputs: a teacher's (Hinton et al., 2015, "Distilling the Knowledge in a Neural
Network"), or those of a second forward pass (R-Drop, Liang et al., 2021)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.config import ProblemType
from toolkit.errors import UserError
from toolkit.objective.losses import Batch, Objective


def with_teacher(
    objective: Objective, problem_type: ProblemType, alpha: float, temperature: float
) -> Objective:
    """(1 - alpha) x the objective + alpha x the distance to the teacher's logits, from `batch.columns`."""

    def losses(batch: Batch, logits: Tensor) -> Tensor:
        distances = distillation_losses(logits, batch.columns["teacher"], problem_type, temperature)
        return (1 - alpha) * objective(batch, logits) + alpha * distances

    return replace(objective, training=losses)


def distillation_losses(
    logits: Tensor, teacher: Tensor, problem_type: ProblemType, temperature: float
) -> Tensor:
    """(B, C) logits of a student and of its teacher -> (B,) float32 losses.

    The Kullback-Leibler divergence at this temperature, times its square to keep the size of gradients; for multi-label
    the mean over labels of binary divergences; for regression the squared error.
    """
    logits = logits.float()
    if problem_type == "regression":
        return (logits - teacher).square().mean(dim=-1)
    logits, teacher = logits / temperature, teacher / temperature
    if problem_type == "multi_label_classification":
        logits, teacher = (
            torch.stack([each, torch.zeros_like(each)], dim=-1) for each in (logits, teacher)
        )
    divergences = F.kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    return temperature**2 * divergences.reshape(len(divergences), -1).mean(dim=-1)


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
        second = model(**batch.inputs).logits  # (B, C), with another dropout
        mean = (first + objective(batch, second)) / 2
        return mean + alpha * divergence(logits, second, problem_type)

    return replace(objective, training=losses)


def divergence(one: Tensor, other: Tensor, problem_type: ProblemType) -> Tensor:
    """(B, C) logits of two passes -> (B,): the mean of both Kullback-Leibler divergences, for multi-label its mean over
    labels."""
    one, other = one.float(), other.float()
    if problem_type == "multi_label_classification":
        return ((one.sigmoid() - other.sigmoid()) * (one - other)).mean(-1) / 2
    p, q = F.log_softmax(one, -1), F.log_softmax(other, -1)
    return ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2
