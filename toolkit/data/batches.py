"""The order of samples, the same for any number of processes, and each process's share of it.

An epoch is a list of global batches. Which samples make up a global batch, and in which order the
batches come, depends on the seed, the epoch and the lengths only. How a global batch is divided into
micro-batches depends on the world, and does not change the sum of the losses over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from toolkit.data.tokens import Split

# Samples are sorted by length within windows of so many global batches (as transformers' Trainer does):
# nearly no padding, and an order that still differs in each epoch.
_WINDOW_BATCHES = 50
# Sizes of GPU matrix products that are multiples of 8 are faster; nothing on a CPU gains.
_GPU_MULTIPLE = 8


@dataclass(frozen=True)
class Batch:
    """One micro-batch on its device; padding samples have weight 0 and id -1."""

    inputs: dict[str, torch.Tensor]
    """`input_ids` (B, S) int64 and, where anything is padded, `attention_mask` (B, S) int64."""
    labels: torch.Tensor
    """(B,) int64, (B, classes) float32 or (B,) float32."""
    weights: torch.Tensor
    """(B,) float32: 1, or 0 for a sample that only keeps the processes in step."""
    ids: torch.Tensor
    """(B,) int64: row in the source."""
    samples: int
    """Real samples."""
    tokens: int
    """Real tokens, padding not counted."""


def epoch_order(
    lengths: np.ndarray, global_batch_size: int, seed: int, epoch: int, group_by_length: bool = True
) -> list[np.ndarray]:
    """Sample indices of each global batch of an epoch: every sample once, the last batch may be smaller."""
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    if not group_by_length:
        return _cut(order, global_batch_size)
    # small sets get smaller windows, or every epoch would be one sorted list
    windows = max(1, min(len(order) // (global_batch_size * 4), _WINDOW_BATCHES))
    batches: list[np.ndarray] = []
    for window in _cut(order, global_batch_size * windows):
        batches += _cut(window[np.argsort(-lengths[window], kind="stable")], global_batch_size)
    short = [batch for batch in batches if len(batch) < global_batch_size]
    full = [batch for batch in batches if len(batch) == global_batch_size]
    return [full[place] for place in generator.permutation(len(full))] + short


def _cut(order: np.ndarray, size: int) -> list[np.ndarray]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def shares(indices: np.ndarray, lengths: np.ndarray, per_device: int, rank: int, world: int) -> list[np.ndarray]:
    """One global batch -> this process's micro-batches: as many, at the same time, on every process.

    Neighbours in length run at the same time on different processes, so none waits long for another.
    A share can be empty when there are fewer samples than processes.
    """
    rounds = max(1, -(-len(indices) // (per_device * world)))
    by_length = indices[np.argsort(-lengths[indices], kind="stable")]
    return np.array_split(by_length, rounds * world)[rank::world]


def rounds_of(samples: int, per_device: int, world: int) -> int:
    """How many micro-batches each process runs for so many samples."""
    return max(1, -(-samples // (per_device * world)))


class Collator:
    """Sample indices -> a padded `Batch` on the device."""

    def __init__(self, split: Split, tokenizer: Any, device: torch.device) -> None:
        self.split = split
        self.pad_id = int(tokenizer.pad_token_id)
        self.left = tokenizer.padding_side == "left"
        self.device = device

    def __call__(self, indices: np.ndarray, real: bool = True) -> Batch:
        """`real=False` makes a batch of padding samples, for a process that has nothing to do."""
        samples = [self.split.tokens(int(index)) for index in indices]
        lengths = [len(sample) for sample in samples]
        width = max(lengths)
        if self.device.type == "cuda":
            width = -(-width // _GPU_MULTIPLE) * _GPU_MULTIPLE
        input_ids = np.full((len(samples), width), self.pad_id, np.int64)  # (B, S)
        mask = np.zeros((len(samples), width), np.int64)  # (B, S)
        for row, sample in enumerate(samples):
            span = slice(width - len(sample), width) if self.left else slice(0, len(sample))
            input_ids[row, span] = sample
            mask[row, span] = 1
        inputs = {"input_ids": self._move(input_ids)}
        if min(lengths) < width:
            inputs["attention_mask"] = self._move(mask)  # without padding attention needs none, and is faster
        return Batch(
            inputs=inputs,
            labels=self._move(self.split.labels[indices]),
            weights=self._move(np.full(len(samples), float(real), np.float32)),
            ids=self._move(self.split.rows[indices] if real else np.full(len(samples), -1, np.int64)),
            samples=len(samples) if real else 0,
            tokens=sum(lengths) if real else 0,
        )

    def _move(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def share(self, indices: np.ndarray) -> Batch:
        """A share from `shares`; an empty one becomes one padding sample."""
        return self(indices) if len(indices) else self(np.zeros(1, np.int64), real=False)


def evaluation_rounds(split: Split, per_device: int, rank: int, world: int) -> Iterator[np.ndarray]:
    """This process's batches of a whole split, longest first, so that memory runs out at once or never."""
    yield from shares(np.arange(len(split)), split.lengths, per_device, rank, world)
