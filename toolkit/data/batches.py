"""Sampling and collating: an epoch's samples -> global batches -> each rank's micro-batches ->
tensors.

1. `epoch_order`: the samples of each optimizer step, from the seed, the epoch and the lengths of
   the texts only.
2. `micro_batches`: a global batch, or the split of an evaluation, divided among ranks. The world
   size does not change the sum of the losses.
3. `Collator`: a micro-batch as padded tensors on the device; `Prefetcher` makes the next one while
   one is computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from toolkit.data.tokens import Split

_WINDOW_BATCHES = 50
"""Samples are sorted by length within windows of this many global batches, as in transformers'
Trainer: little padding, and another order in each epoch."""
_GPU_MULTIPLE = 8  # sizes for which matrix products on GPUs are faster
IGNORED = -100
"""The label of tokens without a loss, as in torch and transformers."""


class Inputs(dict[str, torch.Tensor]):
    """What the model gets. `inputs["attention_mask"]` are ones where nothing is padded, which the
    model needs no mask for: a recipe may pool with it."""

    def __missing__(self, name: str) -> torch.Tensor:
        if name != "attention_mask":
            raise KeyError(name)
        return torch.ones_like(self["input_ids"])


@dataclass(frozen=True)
class Batch:
    """One micro-batch on its device; padding samples have id -1 and weight 0."""

    inputs: dict[str, torch.Tensor]
    """(B, S) int64: `input_ids`; `attention_mask` if anything is padded (`Inputs`);
    `token_type_ids` of pairs."""
    labels: torch.Tensor
    """(B,) int64, (B, classes) float32 or (B,) float32; of tokens (B, T) int64."""
    weights: torch.Tensor
    """(B,) float32: `Split.weights`, or 1; 0 for padding samples."""
    ids: torch.Tensor
    """(B,) int64: rows in the source."""
    samples: int
    """Number of samples, without padding samples."""
    tokens: int
    """Number of tokens, without padding."""
    columns: dict[str, torch.Tensor] = field(default_factory=dict, kw_only=True)
    """Name -> (B, ...): of `Split.columns`."""
    token_samples: torch.Tensor | None = field(default=None, kw_only=True)
    """(R, S) int64, if a row of `input_ids` (R, S) holds several samples: the sample of each token,
    B or more for padding; None: row i is sample i."""


def epoch_order(
    lengths: np.ndarray,
    global_batch_size: int,
    seed: int,
    epoch: int,
    group_by_length: bool = True,
    probabilities: np.ndarray | None = None,
) -> np.ndarray:
    """(samples,) sample indices: every sample once, or as many draws with replacement by
    `probabilities` (samples,). Each `global_batch_size` of them are a global batch; the last may be
    smaller."""
    generator = np.random.default_rng([seed, epoch])
    count = len(lengths)
    if probabilities is None:  # the order of `generator.permutation`, in half the memory
        order: np.ndarray = np.arange(count, dtype=np.int32)
        generator.shuffle(order)
    else:
        order = generator.choice(count, count, p=probabilities)
    if not group_by_length:
        return order
    full = count // global_batch_size
    # smaller windows for small sets, or every epoch would be one sorted list
    size = global_batch_size * max(1, min(full // 4, _WINDOW_BATCHES))
    for start in range(0, count, size):
        window = order[start : start + size]
        window[:] = window[np.argsort(-lengths[window], kind="stable")]
    batches = order[: full * global_batch_size].reshape(full, global_batch_size)
    batches[:] = batches[generator.permutation(full)]  # an incomplete batch stays last
    return order


def micro_batches(
    split: Split,
    indices: np.ndarray,
    per_device: int,
    world: int,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """One global batch -> the micro-batches of all ranks, the longest texts first; rank r computes
    `[r::world]`, so that ranks compute texts of similar length at the same time, and equally many.

    No micro-batch has more than `per_device` samples, or more than `max_tokens` tokens with padding
    unless it is a single text; its texts are of one bucket (`Split.buckets`). It is empty if there
    are fewer samples than ranks."""
    by_length = indices[np.argsort(-split.lengths[indices], kind="stable")]
    if max_tokens is None and split.buckets is None:
        count = math.ceil(len(indices) / (per_device * world))
        return np.array_split(by_length, count * world)
    cut = _cut_by_length(split, by_length, per_device, max_tokens)
    return _halve_to_multiple(cut, split.lengths, world)


def _cut_by_length(
    split: Split, by_length: np.ndarray, per_device: int, max_tokens: int | None
) -> list[np.ndarray]:
    """Samples, longest first -> micro-batches of consecutive samples."""
    sorted_lengths = split.lengths[by_length]
    buckets = np.zeros_like(sorted_lengths)
    if split.buckets is not None:
        buckets = split.buckets.of(sorted_lengths)
    cut: list[np.ndarray] = []
    start = 0
    while start < len(by_length):
        longest = int(sorted_lengths[start])
        size = micro_batch_samples(longest, per_device, max_tokens)
        in_bucket = buckets[start : start + size] == buckets[start]
        size = int(np.count_nonzero(in_bucket))
        cut.append(by_length[start : start + size])
        start += size
    return cut


def _halve_to_multiple(
    cut: list[np.ndarray], lengths: np.ndarray, world: int
) -> list[np.ndarray]:
    """Halves the largest micro-batches until their number is a multiple of `world`."""
    while len(cut) % world:
        tokens = []  # with padding
        for batch in cut:
            of_batch = 0  # a single text cannot be halved
            if len(batch) > 1:
                of_batch = len(batch) * _round_up(int(lengths[batch[0]]))
            tokens.append(of_batch)
        largest = int(np.argmax(tokens))
        if tokens[largest]:
            cut[largest : largest + 1] = np.array_split(cut[largest], 2)
        else:
            cut.append(np.zeros(0, np.int64))  # fewer samples than ranks
    return cut


def micro_batch_samples(longest: int, per_device: int, max_tokens: int | None) -> int:
    """The most samples of a micro-batch whose longest text has so many tokens."""
    if max_tokens is None:
        return per_device
    return min(per_device, max(1, max_tokens // _round_up(longest)))


def _round_up(length: int, multiple: int = _GPU_MULTIPLE) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple


class Collator:
    """Sample indices -> a padded `Batch` on the device."""

    def __init__(self, split: Split, tokenizer: Any, device: torch.device) -> None:
        self.split = split
        self.pad_id = int(tokenizer.pad_token_id)
        self.pad_type = int(getattr(tokenizer, "pad_token_type_id", 0))
        self.left = tokenizer.padding_side == "left"
        self.longest = int(split.lengths.max(initial=0))
        self.multiple = _GPU_MULTIPLE
        if split.buckets is not None:  # padding must not reach the next bucket
            self.multiple = math.gcd(_GPU_MULTIPLE, split.buckets.block)
        self.device = device

    def __call__(self, indices: np.ndarray) -> Batch:
        split = self.split
        lengths = split.lengths[indices]
        types = split.token_types
        if types is not None:
            types = split.gather(types, indices)
        weights = np.ones(len(indices), np.float32)
        if split.weights is not None:
            weights = split.weights[indices]
        columns = {}
        for name, values in split.columns.items():
            columns[name] = self.move(values[indices])
        return Batch(
            inputs=self.inputs(split.gather(split.input_ids, indices), lengths, types),
            labels=self.move(split.labels[indices]),
            weights=self.move(weights),
            ids=self.move(split.rows[indices]),
            samples=len(indices),
            tokens=int(lengths.sum()),
            columns=columns,
        )

    def inputs(
        self, tokens: np.ndarray, lengths: np.ndarray, types: np.ndarray | None
    ) -> dict[str, Any]:
        """(T,) tokens and token types of samples one after another, (B,) their lengths ->
        `Batch.inputs`."""
        width = int(lengths.max())
        is_padded = lengths.min() < width
        if self.device.type == "cuda" and is_padded:  # a mask rules the flash kernel out
            # a model may have no more positions than the longest text
            width = min(_round_up(width, self.multiple), self.longest)
        inputs = Inputs(
            input_ids=self.padded(tokens, lengths, width, self.pad_id, self.left)
        )
        if is_padded:  # without padding attention needs no mask, and is faster
            ones = np.ones_like(tokens)
            inputs["attention_mask"] = self.padded(ones, lengths, width, 0, self.left)
        if types is not None:
            inputs["token_type_ids"] = self.padded(
                types, lengths, width, self.pad_type, self.left
            )
        return inputs

    def loss_denominators(self, indices: np.ndarray) -> np.ndarray:
        """(samples,): what each sample adds to the loss denominator."""
        return self.split.loss_denominators(indices)

    def at(self, epoch: int) -> Collator:
        """The collator for a step: another where its batches depend on the epoch (from 0)."""
        return self

    def prepare_model(self, accelerator: Any, model: Any) -> None:
        """Adapts a model to these batches, before `accelerator.prepare`. Raises UserError for an
        unsupported model."""

    def padded(
        self, values: np.ndarray, lengths: np.ndarray, width: int, filler: int, left: bool
    ) -> torch.Tensor:
        """(T,) values of samples one after another, (B,) their lengths -> (B, width) int64 on the
        device."""
        padded = np.full((len(lengths), width), filler, np.int64)
        columns = np.arange(width)
        if left:
            padded[columns >= width - lengths[:, None]] = values
        else:
            padded[columns < lengths[:, None]] = values
        return self.move(padded)

    def move(self, array: np.ndarray) -> torch.Tensor:
        """Copies to the device, asynchronously."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def collate_padded(collate: Collator, indices: np.ndarray, size: int) -> Batch:
    """A batch of `size` samples: after `indices` come padding samples, of weight 0 and id -1, so
    that every rank takes part in the collectives."""
    count = len(indices)
    if count == size:
        return collate(indices)
    lengths = collate.split.lengths
    filler = indices[-1] if count else lengths.argmin()
    batch = collate(np.append(indices, np.full(size - count, filler)))
    is_sample = torch.arange(size, device=batch.ids.device) < count
    return replace(
        batch,
        ids=torch.where(is_sample, batch.ids, -1),
        weights=batch.weights * is_sample,
        samples=count,
        tokens=int(lengths[indices].sum()),
    )


def collator_of(split: Split, tokenizer: Any, device: torch.device) -> Collator:
    """`split.collator`, or `Collator`."""
    make = split.collator or Collator
    collator: Collator = make(split, tokenizer, device)
    return collator


Collation = partial[Batch]
"""A collator and the samples of one batch."""


class Prefetcher:
    """Collates the next batch and copies it to the device in a thread while the current one is
    computed."""

    def __init__(self, device: torch.device) -> None:
        self._thread = _thread(device)
        self._next: tuple[Collation, Future[Batch]] | None = None

    def batches(
        self, collations: Sequence[Collation], following: Collation | None = None
    ) -> Iterator[Batch]:
        """Their batches; the thread then starts with `following`."""
        next_ones = [*collations[1:], following]
        for collation, next_one in zip(collations, next_ones, strict=True):
            yield self._batch(collation, next_one)

    def _batch(self, collation: Collation, following: Collation | None) -> Batch:
        if self._next is not None and self._next[0] is collation:
            future = self._next[1]
        else:
            future = self._thread.submit(collation)
        self._next = None
        if following is not None:
            self._next = following, self._thread.submit(following)
        return future.result()


@functools.cache
def _thread(device: torch.device) -> ThreadPoolExecutor:
    """One for training and all evaluations, started while memory is available."""
    thread = ThreadPoolExecutor(1, "collate")
    # a new thread's default device is the first, where pinned memory would open a context for
    # every process; the device of a single process is the first, without an index
    if device.type == "cuda" and device.index is not None:
        thread.submit(torch.cuda.set_device, device).result()
    thread.submit(int).result()
    return thread
