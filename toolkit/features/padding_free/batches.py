"""Collates a micro-batch into one row of packed texts, whose positions restart with each text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch

from toolkit.data.batches import Batch, Collator
from toolkit.features.padding_free.model import Packed, accept_packed

_LENGTHS = 8
"""Row lengths on a GPU from one power of two to the next: at most 1/8 of a row is padding, 1/25 on average."""


class PackedCollator(Collator):
    """Sample indices -> a `Batch` of one row. On a GPU texts of padding fill it to one of few lengths (`round_up`), for
    kernels, compiled layers and the caching allocator."""

    def __init__(self, split: Any, tokenizer: Any, device: torch.device, max_tokens: int | None = None) -> None:
        """`max_tokens`: no padding beyond this length of a row."""
        super().__init__(split, tokenizer, device)
        self.max_tokens, self.rounds_up = max_tokens, device.type != "cpu"

    def __call__(self, indices: np.ndarray) -> Batch:
        batch = super().__call__(indices)
        lengths = cast(Packed, batch.inputs["attention_mask"]).lengths
        return replace(batch, token_samples=self.move(np.repeat(np.arange(len(lengths)), lengths)[None]))

    def inputs(self, samples: Sequence[np.ndarray], types: Sequence[np.ndarray] | None) -> dict[str, Any]:
        """`input_ids`, `position_ids` and `token_type_ids` (1, T), and a `Packed` as `attention_mask`."""
        lengths = [len(sample) for sample in samples]
        total, longest = sum(lengths), max(lengths)
        padding = min(round_up(total), max(total, self.max_tokens or round_up(total))) - total if self.rounds_up else 0
        count, rest = divmod(padding, longest)  # padding texts no longer than the others: positions are limited
        lengths += [longest] * count + [rest] * (rest > 0)
        width = round_up(longest) if self.rounds_up else longest
        cu_seqlens = np.fromiter(accumulate(lengths, initial=0), np.int32)
        positions = np.concatenate([np.arange(length) for length in lengths])
        padded_indices = np.repeat(np.arange(len(lengths)) * width, lengths) + positions
        packed = Packed(tuple(lengths), len(samples), width, self.move(cu_seqlens), self.move(padded_indices))
        inputs = {
            "input_ids": self.row(samples, padding, self.pad_id),
            "position_ids": self.move(positions[None]),
            "attention_mask": packed,
        }
        return inputs | ({} if types is None else {"token_type_ids": self.row(types, padding, self.pad_type)})

    def row(self, samples: Sequence[np.ndarray], padding: int, filler: int) -> torch.Tensor:
        """Arrays (length,) -> (1, T) int64 on the device."""
        return self.move(np.concatenate([*samples, np.full(padding, filler)], dtype=np.int64)[None])

    def prepare_model(self, accelerator: Any, model: Any) -> None:
        probe = copy.copy(self)
        probe.device = next(model.parameters()).device
        accept_packed(accelerator, model, probe.inputs([np.arange(3, 10), np.arange(8, 4, -1)], None))


def round_up(tokens: int) -> int:
    step = max(8, (1 << (tokens.bit_length() - 1)) // _LENGTHS)
    return -(-tokens // step) * step
