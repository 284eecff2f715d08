"""FGM (Miyato et al., 2017, "Adversarial Training Methods for Semi-Supervised Text
Classification")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.objective.losses import Batch, Objective
from toolkit.utils.compat import require
from toolkit.utils.modules import unwrapped

# The gradient's length does not count, but on its way through fp16 that of a small loss would
# become 0. A power of two rounds nothing, and this one is below the loss scales of fp16 training.
_SCALE = 128.0


class Adversarial:
    """The mean of the objective and of the losses with the word embeddings of each text moved by
    epsilon along the gradient of its loss.

    It takes the gradient of the embeddings' output, not of their table: so texts do not affect each
    other, and the table may be sharded.
    """

    def __init__(self, objective: Objective, model: Any, epsilon: float) -> None:
        self.objective = objective
        self.model = model
        self.epsilon = epsilon
        self._embedded: Tensor | None = None
        self._shift: Tensor | None = None
        module = unwrapped(model)
        model_type = getattr(getattr(module, "config", None), "model_type", "")
        # XLNet's are (S, B, H)
        if not hasattr(module, "get_input_embeddings") or model_type == "xlnet":
            raise self._fault("has no input embeddings (B, S, H)")
        module.get_input_embeddings().register_forward_hook(self._hook)
        _keep_buffers()

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        # first: the hook keeps the last pass's embeddings
        adversarial = self._adversarial_losses(batch, logits)
        return (self.objective(batch, logits) + adversarial) / 2

    def _adversarial_losses(self, batch: Batch, logits: Tensor) -> Tensor:
        if hasattr(self.model, "zero_optimization_stage"):
            # outside the engine: DeepSpeed would count a gradient of its engine's outputs as the
            # step's, and ZeRO-3 gathers weights for only one backward pass per forward pass
            logits = unwrapped(self.model)(**batch.inputs).logits
        self._shift = self.epsilon * self._directions(batch, logits)
        try:
            return self.objective.losses(self.model(**batch.inputs).logits, batch.labels)
        finally:
            self._shift = None
            self._embedded = None

    def _directions(self, batch: Batch, logits: Tensor) -> Tensor:
        """(B, S, H) float32: the gradient of each text's loss, of length 1."""
        embedded = self._embedded
        if embedded is None or len(embedded) != len(batch.inputs["input_ids"]):  # T5
            raise self._fault("does not embed a batch as (B, S, H)")
        loss = _SCALE * self.objective.losses(logits, batch.labels).sum()
        (gradient,) = torch.autograd.grad(
            loss, embedded, retain_graph=True, allow_unused=True
        )
        if gradient is None:
            raise UserError(
                f"--fgm_epsilon {self.epsilon}: call the model for the logits of `objective(batch, "
                "logits)` after its other passes: it moves the embeddings of the last pass"
            )
        gradient = gradient.float()
        smallest = torch.finfo(torch.float32).tiny
        return gradient / _norms(gradient, batch.token_samples).clamp(min=smallest)

    def _fault(self, what: str) -> UserError:
        kind = type(unwrapped(self.model)).__name__
        return UserError(f"--fgm_epsilon {self.epsilon}: {kind} {what}: leave it out")

    def _hook(self, module: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        if self._shift is not None:
            return embedded + self._shift.to(embedded.dtype)
        if torch.is_grad_enabled():
            if not embedded.requires_grad:  # of frozen embeddings
                embedded = embedded.detach().requires_grad_()
            self._embedded = embedded
        return embedded


def _keep_buffers() -> None:
    """For code compiled from now on (`--torch_compile`, BigBird's fused kernel): by default its
    backward pass may overwrite what it reads, and raises for `retain_graph`."""
    from torch._functorch import config

    require(config, "donated_buffer", "torch")
    config.donated_buffer = False


def _norms(gradient: Tensor, token_samples: Tensor | None) -> Tensor:
    """(R, S, H) -> norms per sample: (R, 1, 1), or with several samples per row
    (`Batch.token_samples`) for each token the norm of its sample, (R, S, 1)."""
    if token_samples is None:
        return gradient.flatten(1).norm(dim=1)[:, None, None]
    squares = gradient.square().sum(-1).flatten()
    samples = token_samples.flatten()
    # fewer samples than tokens
    sums = torch.zeros_like(squares).index_add(0, samples, squares)
    return sums.sqrt()[token_samples][..., None]
