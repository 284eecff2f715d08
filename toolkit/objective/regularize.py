"""What training may add to the losses of a micro-batch: R-Drop and adversarial texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from toolkit.checkpoint.live import unwrapped
from toolkit.config import ObjectiveSettings, ProblemType
from toolkit.data.batches import Batch
from toolkit.errors import UserError


class Regularizer:
    """Nothing, where neither `--r_drop_alpha` nor `--fgm_epsilon` is given.

    Both look at each sample alone, so that they are the same however a global batch is cut into micro-batches.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        asked: ObjectiveSettings,
        problem_type: ProblemType,
    ) -> None:
        """`model` is prepared. Raises UserError for what does not fit it."""
        self.model, self.loss_fn, self.asked, self.problem_type = model, loss_fn, asked, problem_type
        self._embedded: torch.Tensor | None = None
        self._shift: torch.Tensor | None = None
        inner = unwrapped(model)
        if asked.r_drop_alpha and problem_type == "regression":
            raise UserError(f"--r_drop_alpha {asked.r_drop_alpha} compares probabilities of classes: leave it out")
        if asked.fgm_epsilon:
            if not hasattr(inner, "get_input_embeddings"):
                raise UserError(f"--fgm_epsilon {asked.fgm_epsilon}: {type(inner).__name__} has no input embeddings")
            inner.get_input_embeddings().register_forward_hook(self._at_embeddings)

    def __call__(self, batch: Batch, logits: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """(B, C) logits of the model and their (B,) losses -> the (B,) losses to train on."""
        adversarial = self._adversarial(batch, losses) if self.asked.fgm_epsilon else None
        if self.asked.r_drop_alpha:
            again = self.model(**batch.inputs).logits  # (B, C), with another dropout
            losses = (losses + self.loss_fn(again, batch.labels)) / 2
            losses = losses + self.asked.r_drop_alpha * divergence(logits, again, self.problem_type)
        return losses if adversarial is None else (losses + adversarial) / 2

    def _adversarial(self, batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        """(B,) losses of the same texts, each moved by epsilon where its own loss grows most (Miyato et al., 2017,
        "Adversarial Training Methods for Semi-Supervised Text Classification").

        The gradient is that of the word embeddings' output, not of their table: a text is moved by nothing but itself,
        and no parameter need be whole in any process.
        """
        if hasattr(self.model, "zero_optimization_stage"):
            # DeepSpeed takes any gradient of what its engine computed for the step's own, and ZeRO-3 gathers weights
            # for one backward pass of each forward pass only: a pass beside it
            losses = self.loss_fn(unwrapped(self.model)(**batch.inputs).logits, batch.labels)
        assert self._embedded is not None
        (slope,) = torch.autograd.grad(losses.sum(), self._embedded, retain_graph=True)  # (B, S, H)
        length = slope.float().flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)  # (B,)
        self._shift = (self.asked.fgm_epsilon or 0.0) * slope.float() / length[:, None, None]
        try:
            return self.loss_fn(self.model(**batch.inputs).logits, batch.labels)
        finally:
            self._shift = self._embedded = None

    def _at_embeddings(self, module: torch.nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        if self._shift is not None:
            return embedded + self._shift.to(embedded.dtype)
        if torch.is_grad_enabled():
            # frozen embeddings have no slope of their own
            self._embedded = embedded = embedded if embedded.requires_grad else embedded.detach().requires_grad_()
        return embedded


def divergence(one: torch.Tensor, other: torch.Tensor, problem_type: ProblemType) -> torch.Tensor:
    """(B, C) logits twice -> (B,): the mean of both Kullback-Leibler divergences (R-Drop, Liang et al., 2021); of
    several labels the mean over them."""
    one, other = one.float(), other.float()
    if problem_type == "multi_label_classification":
        return ((one.sigmoid() - other.sigmoid()) * (one - other)).mean(-1) / 2
    p, q = F.log_softmax(one, -1), F.log_softmax(other, -1)
    return ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2
