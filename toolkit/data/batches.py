"""The order of samples, the same for any number of processes, and each process's share of it.

An epoch is a list of global batches. Which samples make up a global batch, and in which order the
batches come, depends on the seed, the epoch and the lengths only. How a global batch is divided into
micro-batches depends on the world, and does not change the sum of the losses over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from toolkit.data.tokens import Split, TitleSplit

# Samples are sorted by length within windows of so many global batches (as transformers' Trainer does):
# nearly no padding, and an order that still differs in each epoch.
_WINDOW_BATCHES = 50
# Sizes of GPU matrix products that are multiples of 8 are faster; nothing on a CPU gains.
_GPU_MULTIPLE = 8
IGNORED = -100
"""A label that no loss is taken of, as in torch and transformers."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch on its device; padding samples have weight 0 and id -1."""

    inputs: dict[str, torch.Tensor]
    """`input_ids` (B, S) int64 and, where anything is padded, `attention_mask` (B, S) int64."""
    labels: torch.Tensor
    """(B,) int64, (B, classes) float32 or (B,) float32; of titles (B, T) int64."""
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


def shares(
    indices: np.ndarray, lengths: np.ndarray, per_device: int, rank: int, world: int, max_tokens: int | None = None
) -> list[np.ndarray]:
    """One global batch -> this process's micro-batches: as many, at the same time, on every process.

    None has more than `per_device` samples, nor more than `max_tokens` tokens with its padding, unless one
    text alone has. Neighbours in length run at the same time on different processes, so none waits long for
    another. A share can be empty when there are fewer samples than processes.
    """
    by_length = indices[np.argsort(-lengths[indices], kind="stable")]
    if max_tokens is None:
        rounds = rounds_of(len(indices), per_device, world)
        return np.array_split(by_length, rounds * world)[rank::world]
    return _within(by_length, lengths, per_device, world, max_tokens)[rank::world]


def rounds_of(samples: int, per_device: int, world: int) -> int:
    """How many micro-batches each process runs for so many samples."""
    return max(1, -(-samples // (per_device * world)))


def most_rounds(lengths: np.ndarray, samples: int, per_device: int, world: int, max_tokens: int | None) -> int:
    """The most micro-batches of each process for any `samples` texts of a set: those of its longest."""
    if max_tokens is None:
        return rounds_of(samples, per_device, world)
    longest = np.argsort(-lengths, kind="stable")[:samples]
    return len(_within(longest, lengths, per_device, world, max_tokens)) // world


def _within(
    by_length: np.ndarray, lengths: np.ndarray, per_device: int, world: int, max_tokens: int
) -> list[np.ndarray]:
    """Samples, longest first -> neighbours that fit together, in a number that divides among the processes."""
    groups: list[np.ndarray] = []
    start = 0
    while start < len(by_length):
        size = min(per_device, max(1, max_tokens // _width(lengths[by_length[start]])))
        groups.append(by_length[start : start + size])
        start += size
    while len(groups) % world or not groups:
        padded = [len(group) * _width(lengths[group[0]]) if len(group) > 1 else 0 for group in groups]
        largest = int(np.argmax(padded)) if groups else 0
        if not groups or not padded[largest]:
            groups.append(by_length[:0])  # fewer samples than processes
        else:
            groups[largest : largest + 1] = np.array_split(groups[largest], 2)
    return groups


def _width(length: int) -> int:
    return -(-int(length) // _GPU_MULTIPLE) * _GPU_MULTIPLE


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
            width = _width(width)
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


class TitleCollator(Collator):
    """Sample indices -> a padded `Batch` whose labels are the tokens of titles."""

    split: TitleSplit

    def __call__(self, indices: np.ndarray, real: bool = True) -> Batch:
        """`decoder_input_ids` (B, T) begin with each title's first token; `labels` (B, T) are what follows each of
        them, and IGNORED where a title has ended."""
        batch = super().__call__(indices, real)
        titles = [self.split.target(int(index)) for index in indices]
        width = max(len(title) for title in titles) - 1
        given = np.full((len(titles), width), self.pad_id, np.int64)  # (B, T)
        wanted = np.full((len(titles), width), IGNORED, np.int64)  # (B, T)
        for row, title in enumerate(titles):
            given[row, : len(title) - 1] = title[:-1]
            wanted[row, : len(title) - 1] = title[1:]
        # no mask of the decoder's padding: it comes last, and no token looks ahead
        inputs = {**batch.inputs, "decoder_input_ids": self._move(given)}
        return replace(batch, inputs=inputs, labels=self._move(wanted))


def collator_of(split: Split, tokenizer: Any, device: torch.device) -> Collator:
    """The one for this kind of split."""
    return (TitleCollator if isinstance(split, TitleSplit) else Collator)(split, tokenizer, device)


def evaluation_rounds(
    split: Split, per_device: int, rank: int, world: int, max_tokens: int | None = None
) -> Iterator[np.ndarray]:
    """This process's batches of a whole split, longest first, so that memory runs out at once or never."""
    yield from shares(np.arange(len(split)), split.lengths, per_device, rank, world, max_tokens)
