"""FGM (Miyato et al., 2017, "Adversarial Training Methods for Semi-Supervised Text Classification")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.objective.base import Batch, Objective
from toolkit.utils.modules import unwrapped


class Adversarial(Objective):
    """The mean of the objective and of the losses of the same texts, each moved by epsilon to where its own loss grows
    most.

    The gradient is that of the word embeddings' output, not of their table: a text is moved by its own loss alone, and
    no parameter need be whole in any process.
    """

    def __init__(self, objective: Objective, model: Any, epsilon: float) -> None:
        super().__init__(objective.losses)
        self.objective, self.model, self.epsilon = objective, model, epsilon
        self._embedded: Tensor | None = None
        self._shift: Tensor | None = None
        module = unwrapped(model)
        if not hasattr(module, "get_input_embeddings"):
            raise UserError(f"--fgm_epsilon {epsilon}: {type(module).__name__} has no input embeddings")
        module.get_input_embeddings().register_forward_hook(self._hook)

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        adversarial = self._adversarial_losses(batch, logits)  # the hook holds the embeddings of the latest pass
        return (self.objective(batch, logits) + adversarial) / 2

    def _adversarial_losses(self, batch: Batch, logits: Tensor) -> Tensor:
        if hasattr(self.model, "zero_optimization_stage"):
            # DeepSpeed takes any gradient of its engine's outputs for the step's own, and ZeRO-3 gathers weights for
            # one backward pass of each forward pass only: a forward pass outside of the engine
            logits = unwrapped(self.model)(**batch.inputs).logits
        assert self._embedded is not None
        losses = self.losses(logits, batch.labels)
        (gradient,) = torch.autograd.grad(losses.sum(), self._embedded, retain_graph=True)  # (B, S, H)
        norms = _norms(gradient.float(), batch.token_samples).clamp(min=torch.finfo(torch.float32).tiny)
        self._shift = self.epsilon * gradient.float() / norms
        try:
            return self.losses(self.model(**batch.inputs).logits, batch.labels)
        finally:
            self._shift = self._embedded = None

    def _hook(self, module: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        if self._shift is not None:
            return embedded + self._shift.to(embedded.dtype)
        if torch.is_grad_enabled():
            # the output of frozen embeddings requires no gradient by itself
            self._embedded = embedded = embedded if embedded.requires_grad else embedded.detach().requires_grad_()
        return embedded


def _norms(gradient: Tensor, token_samples: Tensor | None) -> Tensor:
    """(R, S, H) -> the norm of each sample's part of it: (R, 1, 1), or of each token's sample, (R, S, 1), where a row
    holds several (`Batch.token_samples`)."""
    if token_samples is None:
        return gradient.flatten(1).norm(dim=1)[:, None, None]
    squares, samples = gradient.square().sum(-1).flatten(), token_samples.flatten()
    sums = torch.zeros_like(squares).index_add(0, samples, squares)  # there are fewer samples than tokens
    return sums.sqrt()[token_samples][..., None]
