"""The tokens of a split: one flat array, memory-mapped, so that ranks share its pages.

A sample is a slice of it: nothing is parsed or copied until its batch is made."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import pretrained
from toolkit.data.tokenizer import has_token_types
from toolkit.errors import UserError


@dataclass(frozen=True)
class LengthBuckets:
    """Which texts may share a micro-batch. A BigBird computes batches up to `full` tokens wide with
    full attention, which padding does not change, and wider ones in blocks: which blocks a text
    attends to depends on the padded width."""

    full: int
    block: int

    @classmethod
    def of_model(cls, config: Any) -> LengthBuckets | None:
        """For a model's config; None if the width of a batch does not change the outputs."""
        config = pretrained.encoder_config(config)
        is_bigbird = getattr(config, "model_type", "") == "big_bird"
        if not is_bigbird or config.attention_type != "block_sparse":
            return None
        full = pretrained.full_attention_up_to(config.block_size, config.num_random_blocks)
        return cls(full, config.block_size)

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """(samples,) int64 bucket ids: texts of one bucket have the same outputs together as
        alone."""
        return np.where(lengths <= self.full, 0, -(-lengths // self.block))


@dataclass(frozen=True)
class Split:
    """The tokens and labels of one split; sample i is `input_ids[offsets[i]:offsets[i + 1]]`."""

    name: str
    folder: Path
    input_ids: np.ndarray
    """(tokens,) int32, all samples one after another."""
    offsets: np.ndarray
    """(samples + 1,) int64."""
    labels: np.ndarray
    """(samples,) int64, (samples, classes) float32 or (samples,) float32."""
    rows: np.ndarray
    """(samples,) int64, the sample ids: their rows in the source, from 0."""
    buckets: LengthBuckets | None = field(default=None, kw_only=True)
    """Set if the width of a batch changes the model's outputs."""
    token_types: np.ndarray | None = field(default=None, kw_only=True)
    """(tokens,) int8, of pairs: 0 or 1, the text of each token; None if the tokenizer has no
    types."""
    weights: np.ndarray | None = field(default=None, kw_only=True)
    """(samples,) float32: the weight of each sample's loss (--class_weights); 1 if None."""
    sampling_probabilities: np.ndarray | None = field(default=None, kw_only=True)
    """(samples,) float64, of --sampling, their sum is 1; None: an epoch has each sample once."""
    columns: dict[str, np.ndarray] = field(default_factory=dict, kw_only=True)
    """Name -> (samples, ...): extra arrays for `Batch.columns`."""
    collator: Any = field(default=None, kw_only=True)
    """A subclass of `toolkit.data.batches.Collator`, or a function that makes one; None:
    `Collator`."""

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if len(values) != len(self):
                raise UserError(
                    f"column {name} of the {self.name} split has {len(values)} values for "
                    f"{len(self)} samples: index the values of the file's rows with `split.rows` "
                    "(docs/data.md, Labels)"
                )

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """(samples,) int32, in tokens."""
        return np.subtract(
            self.offsets[1:], self.offsets[:-1], dtype=np.int32, casting="unsafe"
        )

    def tokens(self, index: int) -> np.ndarray:
        """(length,) int32."""
        return self.input_ids[self.offsets[index] : self.offsets[index + 1]]

    def gather(self, values: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Per token, (tokens,), of all samples -> (T,), of the samples `indices`, one after
        another."""
        return gather_slices(values, self.offsets, indices)[0]

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,): what each sample adds to the loss denominator: 1, int64, or its weight,
        float64."""
        if self.weights is None:
            return np.broadcast_to(np.int64(1), len(self))[indices]
        return self.weights[indices].astype(np.float64)

    def saved_texts(self) -> list[list[str]]:
        """The source texts of each sample, one or a pair; none of the training split, whose texts
        are not saved."""
        return read_jsonl(self.folder / "texts.jsonl")

    def texts(self) -> list[str]:
        """`saved_texts` by `join_pair`."""
        return [join_pair(*texts) for texts in self.saved_texts()]


def gather_slices(
    values: np.ndarray, offsets: np.ndarray, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The slices `values[offsets[i]:offsets[i + 1]]`, one after another, and (samples,) their
    lengths. A loop over samples would hold the interpreter's lock, which the thread that drives a
    GPU needs."""
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    ends = lengths.cumsum()
    places = np.arange(ends[-1]) + np.repeat(begins - ends + lengths, lengths)
    return values[places], lengths


def join_pair(text: str, *second: str) -> str:
    """The texts of a sample as one, for reports: of a pair the first line is the first text."""
    if not second:
        return text
    return "\n".join([text.replace("\n", " "), *second])


def read_jsonl(path: Path) -> list[Any]:
    """The items of a JSONL file; empty if it is missing."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def of_model(arrays: Mapping[str, np.ndarray], config: Any) -> dict[str, Any]:
    """The arrays of a split that a model reads, and its length buckets."""
    read: dict[str, Any] = dict(arrays)
    if not has_token_types(config):
        read.pop("token_types", None)
    return {"buckets": LengthBuckets.of_model(config), **read}
