"""FGM (Miyato et al., 2017, "Adversarial Training Methods for Semi-Supervised Text Classification")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.objective.losses import Batch, Objective
from toolkit.utils.compat import require
from toolkit.utils.modules import unwrapped

# The gradient's length does not count, but on its way through fp16 that of a small loss would become 0. A power of two
# rounds nothing, and this one is below the loss scales of fp16 training.
_SCALE = 128.0


class Adversarial:
    """The mean of the objective and of the losses with the word embeddings of each text moved by epsilon along the
    gradient of its loss.

    It takes the gradient of the embeddings' output, not of their table: so texts do not affect each other, and the
    table may be sharded.
    """

    def __init__(self, objective: Objective, model: Any, epsilon: float) -> None:
        self.objective, self.model, self.epsilon = objective, model, epsilon
        self._embedded: Tensor | None = None
        self._shift: Tensor | None = None
        module = unwrapped(model)
        kind, config = type(module).__name__, getattr(module, "config", None)
        # XLNet's are (S, B, H)
        if (
            not hasattr(module, "get_input_embeddings")
            or getattr(config, "model_type", "") == "xlnet"
        ):
            raise UserError(
                f"--fgm_epsilon {epsilon}: {kind} has no input embeddings (B, S, H): leave it out"
            )
        module.get_input_embeddings().register_forward_hook(self._hook)
        _keep_buffers()

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        adversarial = self._adversarial_losses(
            batch, logits
        )  # first: the hook keeps the last pass's embeddings
        return (self.objective(batch, logits) + adversarial) / 2

    def _adversarial_losses(self, batch: Batch, logits: Tensor) -> Tensor:
        if hasattr(self.model, "zero_optimization_stage"):
            # outside the engine: DeepSpeed would count a gradient of its engine's outputs as the step's, and ZeRO-3
            # gathers weights for only one backward pass per forward pass
            logits = unwrapped(self.model)(**batch.inputs).logits
        if self._embedded is None or len(self._embedded) != len(batch.inputs["input_ids"]):  # T5
            kind = type(unwrapped(self.model)).__name__
            raise UserError(
                f"--fgm_epsilon {self.epsilon}: {kind} does not embed a batch as (B, S, H): leave it out"
            )
        losses = self.objective.losses(logits, batch.labels)
        loss = _SCALE * losses.sum()
        (gradient,) = torch.autograd.grad(
            loss, self._embedded, retain_graph=True, allow_unused=True
        )  # (B, S, H)
        if gradient is None:
            how = (
                "call the model for the logits of `objective(batch, logits)` after its other passes"
            )
            raise UserError(
                f"--fgm_epsilon {self.epsilon}: {how}: it moves the embeddings of the last pass"
            )
        norms = _norms(gradient.float(), batch.token_samples).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        self._shift = self.epsilon * gradient.float() / norms
        try:
            return self.objective.losses(self.model(**batch.inputs).logits, batch.labels)
        finally:
            self._shift = self._embedded = None

    def _hook(self, module: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        if self._shift is not None:
            return embedded + self._shift.to(embedded.dtype)
        if torch.is_grad_enabled():
            # frozen embeddings' output does not require a gradient
            self._embedded = embedded = (
                embedded if embedded.requires_grad else embedded.detach().requires_grad_()
            )
        return embedded


def _keep_buffers() -> None:
    """For code compiled from now on (`--torch_compile`, BigBird's fused kernel): by default its backward pass may
    overwrite what it reads, and raises for `retain_graph`."""
    from torch._functorch import config

    require(config, "donated_buffer", "torch")
    config.donated_buffer = False


def _norms(gradient: Tensor, token_samples: Tensor | None) -> Tensor:
    """(R, S, H) -> norms per sample: (R, 1, 1), or with several samples per row (`Batch.token_samples`) for each token
    the norm of its sample, (R, S, 1)."""
    if token_samples is None:
        return gradient.flatten(1).norm(dim=1)[:, None, None]
    squares, samples = gradient.square().sum(-1).flatten(), token_samples.flatten()
    sums = torch.zeros_like(squares).index_add(0, samples, squares)  # fewer samples than tokens
    return sums.sqrt()[token_samples][..., None]
