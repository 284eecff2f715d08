"""The next batch is made while this one is computed."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from toolkit.data.batches import Batch, Collator


class Ahead:
    """Collates in a thread of its own, which also copies to the device."""

    def __init__(self, collate: Collator) -> None:
        self.collate, self._thread = collate, _thread(collate.device)
        self._next: tuple[np.ndarray, Future[Batch]] | None = None

    def batch(self, indices: np.ndarray, following: np.ndarray | None) -> Batch:
        """The batch of these samples; from here on that of the `following` ones is made."""
        made = self._next[1] if self._next and self._next[0] is indices else self._thread.submit(self.collate, indices)
        self._next = None if following is None else (following, self._thread.submit(self.collate, following))
        return made.result()


@functools.cache
def _thread(device: torch.device) -> ThreadPoolExecutor:
    """One for training and all evaluations, begun before memory is scarce."""
    # a thread's device is the first one, where pinned memory would open a context for every process
    on_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    thread = ThreadPoolExecutor(1, "collate", initializer=on_device)
    thread.submit(int).result()
    return thread
