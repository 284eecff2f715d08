"""Sampling and collating: an epoch's samples -> global batches -> each rank's micro-batches ->
tensors.

1. `GlobalBatches`: the samples of each optimizer step, from the seed, the epoch and the lengths of
   the texts only.
2. `micro_batches`: a global batch, or the split of an evaluation, divided among ranks. The world
   size does not change the sum of the losses.
3. `Collator`: a micro-batch as padded tensors on the device; `Prefetcher` makes the next one while
   one is computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from toolkit.data.tokens import LengthBuckets, Split
from toolkit.errors import UserError

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
    """One micro-batch on its device; padding samples have id -1, and in training weight 0."""

    inputs: dict[str, torch.Tensor]
    """(B, S) int64: `input_ids`; `attention_mask` if anything is padded (`Inputs`);
    `token_type_ids` of pairs."""
    labels: torch.Tensor
    """(B,) int64, (B, classes) float32 or (B,) float32; of tokens (B, T) int64."""
    weights: torch.Tensor
    """(B,) float32: `Split.weights`, or 1; in training 0 for padding samples."""
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


class GlobalBatches(Sequence[np.ndarray]):
    """Sample indices of each global batch of an epoch: every sample once, or as many draws with
    replacement by `probabilities` (samples,). The last batch may be smaller. Batches are sorted
    when they are indexed, so that an epoch of many samples starts immediately."""

    def __init__(
        self,
        lengths: np.ndarray,
        global_batch_size: int,
        seed: int,
        epoch: int,
        group_by_length: bool = True,
        probabilities: np.ndarray | None = None,
    ) -> None:
        generator = np.random.default_rng([seed, epoch])
        count = len(lengths)
        if probabilities is None:  # the order of `generator.permutation`, in half the memory
            self._order: np.ndarray = np.arange(count, dtype=np.int32)
            generator.shuffle(self._order)
        else:
            self._order = generator.choice(count, count, p=probabilities)
        self._lengths = lengths
        self._size = global_batch_size
        self._by_length = group_by_length
        full = count // global_batch_size
        # smaller windows for small sets, or every epoch would be one sorted list
        self._window = global_batch_size * max(1, min(full // 4, _WINDOW_BATCHES))
        self._sorted: set[int] = set()
        """The windows whose samples are sorted."""
        self._places = np.arange(full)
        """Of each batch but an incomplete last one, in the order of samples."""
        if group_by_length:
            self._places = generator.permutation(full)

    def __len__(self) -> int:
        return -(-len(self._order) // self._size)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        place = number  # the incomplete batch stays last
        if number < len(self._places):
            place = int(self._places[number])
        start = self._size * place
        if self._by_length:
            self._sort_window(start // self._window)
        return self._order[start : start + self._size]

    def _sort_window(self, number: int) -> None:
        if number not in self._sorted:
            window = self._order[number * self._window : (number + 1) * self._window]
            window[:] = window[np.argsort(-self._lengths[window], kind="stable")]
            self._sorted.add(number)


def micro_batches(
    split: Split,
    indices: np.ndarray,
    per_device: int,
    rank: int,
    world: int,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """One global batch -> this rank's micro-batches, equally many on every rank.

    None has more than `per_device` samples, or more than `max_tokens` tokens with padding unless it
    is a single text; its texts are of one bucket (`Split.buckets`). Ranks compute texts of similar
    length at the same time. A micro-batch is empty if there are fewer samples than ranks."""
    by_length = indices[np.argsort(-split.lengths[indices], kind="stable")]
    if max_tokens is None and split.buckets is None:
        count = max(1, -(-len(indices) // (per_device * world)))
        return np.array_split(by_length, count * world)[rank::world]
    cut = _cut_by_length(by_length, split.lengths[by_length], per_device, max_tokens, split.buckets)
    return _halve_to_multiple(cut, split.lengths, world)[rank::world]


def accumulation_of(
    split: Split, samples: int, per_device: int, world: int, max_tokens: int | None
) -> int:
    """An upper bound of the micro-batches per rank of any `samples` texts of a split."""
    if max_tokens is None and split.buckets is None:
        return max(1, -(-samples // (per_device * world)))
    longest = split.longest(samples)
    if split.sampling_probabilities is not None:  # one text may be drawn repeatedly
        longest = np.full_like(longest, longest[0])
    most = len(_cut_by_length(longest, split.lengths[longest], per_device, max_tokens, None))
    if split.buckets is not None:  # the last micro-batch of a bucket may not be full
        lengths = np.flatnonzero(np.bincount(split.lengths))
        most = min(len(longest), most + len(np.unique(split.buckets.of(lengths))) - 1)
    return max(1, -(-most // world))


def _cut_by_length(
    by_length: np.ndarray,
    lengths: np.ndarray,
    per_device: int,
    max_tokens: int | None,
    buckets: LengthBuckets | None,
) -> list[np.ndarray]:
    """Samples, longest first, and their lengths -> micro-batches of consecutive samples."""
    bucket = np.zeros_like(lengths)
    if buckets is not None:
        bucket = buckets.of(lengths)
    cut: list[np.ndarray] = []
    start = 0
    while start < len(by_length):
        size = per_device
        if max_tokens is not None:
            size = min(size, max(1, max_tokens // _width(lengths[start])))
        same_bucket = int(np.count_nonzero(bucket[start : start + size] == bucket[start]))
        cut.append(by_length[start : start + same_bucket])
        start += same_bucket
    return cut


def _halve_to_multiple(cut: list[np.ndarray], lengths: np.ndarray, world: int) -> list[np.ndarray]:
    """Halves the largest micro-batches until their number is a multiple of `world`."""
    while len(cut) % world or not cut:
        padded = [0]
        for batch in cut:
            divisible = len(batch) > 1
            padded.append(len(batch) * _width(lengths[batch[0]]) if divisible else 0)
        largest = int(np.argmax(padded))
        if not padded[largest]:
            cut.append(np.zeros(0, np.int64))  # fewer samples than ranks
        else:
            cut[largest - 1 : largest] = np.array_split(cut[largest - 1], 2)
    return cut


def _width(length: int) -> int:
    return -(-int(length) // _GPU_MULTIPLE) * _GPU_MULTIPLE


def padded_width(length: int, longest: int, buckets: LengthBuckets | None) -> int:
    """`_width`, but at most the longest text of the split (a model may have no more positions) and
    of the bucket."""
    if buckets is not None:
        longest = min(longest, buckets.widest(length))
    return min(_width(length), longest)


class Collator:
    """Sample indices -> a padded `Batch` on the device."""

    def __init__(self, split: Split, tokenizer: Any, device: torch.device) -> None:
        self.split = split
        self.pad_id = int(tokenizer.pad_token_id)
        self.pad_type = int(getattr(tokenizer, "pad_token_type_id", 0))
        self.left = tokenizer.padding_side == "left"
        self.longest = int(split.lengths.max(initial=0))
        self.device = device

    def __call__(self, indices: np.ndarray) -> Batch:
        """An empty micro-batch becomes one padding sample, so that every rank takes part in the
        collectives."""
        if len(indices):
            return self.collate(indices)
        batch = self.collate(np.zeros(1, np.int64))
        no_weights = torch.zeros_like(batch.weights)
        no_ids = torch.full_like(batch.ids, -1)
        return replace(batch, weights=no_weights, ids=no_ids, samples=0, tokens=0)

    def collate(self, indices: np.ndarray) -> Batch:
        """The batch of at least one sample."""
        split = self.split
        lengths = split.lengths[indices]
        types = split.token_types
        if types is not None:
            types = split.gather(types, indices)
        weights = np.ones(len(indices), np.float32)
        if split.weights is not None:
            weights = split.weights[indices]
        return Batch(
            inputs=self.inputs(split.gather(split.input_ids, indices), lengths, types),
            labels=self.move(split.labels[indices]),
            weights=self.move(weights),
            ids=self.move(split.rows[indices]),
            samples=len(indices),
            tokens=int(lengths.sum()),
            columns={name: self.move(values[indices]) for name, values in split.columns.items()},
        )

    def inputs(
        self, tokens: np.ndarray, lengths: np.ndarray, types: np.ndarray | None
    ) -> dict[str, Any]:
        """(T,) tokens and token types of samples one after another, (B,) their lengths ->
        `Batch.inputs`."""
        width = int(lengths.max())
        is_padded = lengths.min() < width
        if self.device.type == "cuda" and is_padded:  # a mask rules the flash kernel out
            width = padded_width(width, self.longest, self.split.buckets)
        inputs = Inputs(input_ids=self.padded(tokens, lengths, width, self.pad_id, self.left))
        if is_padded:  # without padding attention needs no mask, and is faster
            ones = np.ones_like(tokens)
            inputs["attention_mask"] = self.padded(ones, lengths, width, 0, self.left)
        if types is not None:
            inputs["token_type_ids"] = self.padded(types, lengths, width, self.pad_type, self.left)
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
        buckets = LengthBuckets.of_model(getattr(model, "config", None))
        if self.split.buckets and buckets and buckets != self.split.buckets:
            why = (
                "model.config has another block_size or num_random_blocks than when the "
                "texts were loaded"
            )
            raise UserError(
                f"{why}: pass --model_name_or_path OUT, of `toolkit to-bigbird BERT OUT "
                "--block_size N`"
            )

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

    def batch(self, collation: Collation, following: Collation | None) -> Batch:
        """The batch of `collation`; the thread then starts with `following`."""
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
