"""An exponential moving average of the weights (`--ema_decay`).

It is stored as the entry `ema` of each weight's optimizer state, so every strategy shards, saves
and resumes it as it does the moments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from toolkit.checkpoint.state import LiveState

_KEY = "ema"


class Average:
    """All processes call `update`."""

    def __init__(self, live: LiveState, decay: float) -> None:
        self._optimizer, self._decay = live.optimizer, decay
        self._trained = [tensor for tensor, _ in live.optimizer_tensors()]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Adds the current weights, after `updates` optimizer updates. As in TensorFlow's
        `ExponentialMovingAverage` the decay is at most (1 + updates) / (10 + updates), so that the
        first weights do not dominate a short run."""
        states = self._optimizer.state
        # without a gradient so far a weight has no state, which AdamW would take for initialized:
        # its average is the weight itself
        tensors = [tensor for tensor in self._trained if states.get(tensor)]
        if not tensors:  # an optimizer that keeps no state: SGD
            tensors = self._trained
        for tensor in tensors:
            if _KEY not in states[tensor]:
                states[tensor][_KEY] = tensor.detach().clone()
        if tensors:
            averages = [states[tensor][_KEY] for tensor in tensors]
            decay = min(self._decay, (1 + updates) / (10 + updates))
            torch._foreach_lerp_(averages, tensors, 1 - decay)


def remove_average(live: LiveState) -> None:
    for state in live.optimizer.state.values():
        state.pop(_KEY, None)


@contextlib.contextmanager
def average_as_weights(live: Callable[[], LiveState]) -> Iterator[None]:
    """Within this context the model's weights are their average, if there is one, for evaluating
    and saving; all processes call this."""
    _swap(live())
    try:
        yield
    finally:
        _swap(live())


@torch.no_grad()
def _swap(live: LiveState) -> None:
    """Swaps the weights and their average, bit for bit."""
    live.before_loading()
    for tensor, _ in live.optimizer_tensors():
        state = live.optimizer.state.get(tensor, {})
        if _KEY in state:
            weights = tensor.detach().clone()
            tensor.detach().copy_(state[_KEY])
            state[_KEY].copy_(weights)
    live.after_loading()
