"""The distance to a teacher's outputs (Hinton et al., 2015, "Distilling the Knowledge in a Neural
Network")."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.config import ProblemType
from toolkit.objective.losses import Batch, Objective


def with_teacher(
    objective: Objective, problem_type: ProblemType, alpha: float, temperature: float
) -> Objective:
    """(1 - alpha) x the objective + alpha x the distance to the teacher's logits, from
    `batch.columns`."""

    def losses(batch: Batch, logits: Tensor) -> Tensor:
        distances = distillation_losses(
            logits, batch.columns["teacher"], problem_type, temperature
        )
        return (1 - alpha) * objective(batch, logits) + alpha * distances

    return replace(objective, training=losses)


def distillation_losses(
    logits: Tensor, teacher: Tensor, problem_type: ProblemType, temperature: float
) -> Tensor:
    """(B, C) logits of a student and of its teacher -> (B,) float32 losses.

    The Kullback-Leibler divergence at this temperature, times its square to keep the size of
    gradients; for multi-label the mean over labels of binary divergences; for regression the
    squared error, without a temperature.
    """
    logits = logits.float()
    if problem_type == "regression":
        return (logits - teacher).square().mean(dim=-1)
    logits = logits / temperature
    teacher = teacher / temperature
    if problem_type == "multi_label_classification":  # (B, C) -> (B, C, 2)
        logits = torch.stack([logits, torch.zeros_like(logits)], dim=-1)
        teacher = torch.stack([teacher, torch.zeros_like(teacher)], dim=-1)
    divergences = F.kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    return temperature**2 * divergences.reshape(len(divergences), -1).mean(dim=-1)
