"""A moving average of the weights (`--ema_decay`), kept where the strategy keeps the weights it trains.

It is one more thing that the optimizer keeps of each weight, under the key `ema`: so it is sharded, saved and resumed
as the moments are, under every strategy and from one to another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from toolkit.checkpoint.live import LiveState

_KEY = "ema"


@torch.no_grad()
def update_average(state: LiveState, decay: float, steps: int) -> None:
    """Takes in the weights after optimizer step `steps`. A short run would keep too much of its beginning: as in
    TensorFlow's `ExponentialMovingAverage` the decay is at most (1 + steps) / (10 + steps)."""
    for holder, kept in _kept(state):
        if _KEY in kept:
            kept[_KEY].lerp_(holder.detach(), 1 - min(decay, (1 + steps) / (10 + steps)))
        else:
            kept[_KEY] = holder.detach().clone()


@contextlib.contextmanager
def averaged_weights(live: Callable[[], LiveState], steps: int) -> Iterator[None]:
    """In here the model computes with the average, and is saved as that. All processes enter; `live`: the state."""
    _exchange(live(), steps)
    try:
        yield
    finally:
        _exchange(live(), steps)


@torch.no_grad()
def _exchange(state: LiveState, steps: int) -> None:
    """The weights and their average change places, to the bit."""
    state.before_loading()
    for holder, kept in _kept(state):
        if _KEY in kept:
            weights = holder.detach().clone()
            holder.detach().copy_(kept[_KEY])
            kept[_KEY].copy_(weights)
    state.after_loading(steps)


def _kept(state: LiveState) -> Iterator[tuple[torch.Tensor, Any]]:
    """Each tensor that this process trains, with what the optimizer keeps of it."""
    for holder, _ in state.holders():
        yield holder, state.optimizer.state[holder]
