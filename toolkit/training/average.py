"""A moving average of the weights (`--ema_decay`), stored where the strategy stores the weights it trains.

It is one more entry of the optimizer's state of each weight, `ema`: so it is sharded, saved and resumed as the moments
are, under every strategy and from one to another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from toolkit.checkpoint.live import LiveState

_KEY = "ema"


class Average:
    """The average of one run's weights; all processes call every method. `live` gives their state."""

    def __init__(self, live: Callable[[], LiveState], decay: float) -> None:
        self._live, self._decay = live, decay
        self._trained: tuple[list[torch.Tensor], Any] | None = None

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Adds the weights after so many updates of them. In a short run the first weights would count too much: as in
        TensorFlow's `ExponentialMovingAverage` the decay is at most (1 + updates) / (10 + updates)."""
        if self._trained is None:  # once: maps of all parameters are made for it
            live = self._live()
            self._trained = [tensor for tensor, _ in live.optimizer_tensors()], live.optimizer
        tensors, optimizer = self._trained
        for tensor in tensors:
            if _KEY not in (state := optimizer.state[tensor]):
                state[_KEY] = tensor.detach().clone()
        if tensors:
            averages = [optimizer.state[tensor][_KEY] for tensor in tensors]
            torch._foreach_lerp_(averages, tensors, 1 - min(self._decay, (1 + updates) / (10 + updates)))

    @contextlib.contextmanager
    def as_weights(self, steps: int) -> Iterator[None]:
        """A context in which the model computes with the average, and is saved as that."""
        self._exchange(steps)
        try:
            yield
        finally:
            self._exchange(steps)

    @torch.no_grad()
    def _exchange(self, steps: int) -> None:
        """Swaps the weights and their average, bit for bit."""
        live = self._live()
        live.before_loading()
        for tensor, _ in live.optimizer_tensors():
            if _KEY in (state := live.optimizer.state[tensor]):
                weights = tensor.detach().clone()
                tensor.detach().copy_(state[_KEY])
                state[_KEY].copy_(weights)
        live.after_loading(steps)
