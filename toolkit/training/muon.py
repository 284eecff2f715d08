"""PyTorch's Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks") for the matrices of
hidden layers, and its AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as TorchMuon

HIDDEN = "hidden_matrices"
"""The key of a parameter group: whether Muon trains it."""


class Muon(Optimizer):
    """Muon's updates are scaled to the size of AdamW's (Liu et al., 2025, "Muon is Scalable for LLM Training"), so one
    learning rate, weight decay and schedule suits both."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """`params`: parameter groups; Muon trains those whose `HIDDEN` is true."""
        groups = list(params)
        hidden, rest = ([group for group in groups if group.get(HIDDEN, False) is kind] for kind in (True, False))
        self._muon = TorchMuon(
            hidden or [{"params": []}], lr, weight_decay, momentum, nesterov, ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        self._adamw = AdamW(rest or [{"params": []}], lr, betas, eps, weight_decay)
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})  # both have filled in their defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Both use this optimizer's groups and state, which loading a checkpoint replaces."""
        for optimizer in (self._muon, self._adamw):
            hidden = optimizer is self._muon
            optimizer.param_groups = [group for group in self.param_groups if group.get(HIDDEN, False) is hidden]
            optimizer.state = self.state
            optimizer.step()
        return closure and closure()
