"""Samples -> one row of tokens, a text after the other, whose positions begin anew with each text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch

from toolkit.data.batches import Batch, Collator
from toolkit.features.padding_free.model import Packed, take_rows

_BUDGETS = 8
"""Lengths of a row on a GPU, between one power of two and the next: at most 1/8 of a row is padding, 1/25 usually."""


class PackedCollator(Collator):
    """Sample indices -> a `Batch` of one row. On a GPU its length is one of a few (`budget`), for kernels, compiled
    layers and the allocator of memory: texts of padding fill it."""

    def __init__(self, split: Any, tokenizer: Any, device: torch.device, most: int | None = None) -> None:
        """`most`: the most tokens of a row, as far as its texts leave that open."""
        super().__init__(split, tokenizer, device)
        self.most, self.rounds = most, device.type != "cpu"

    def __call__(self, indices: np.ndarray) -> Batch:
        batch = super().__call__(indices)
        lengths = cast(Packed, batch.inputs["attention_mask"]).lengths
        return replace(batch, token_samples=self.move(np.repeat(np.arange(len(lengths)), lengths)[None]))

    def inputs(self, samples: Sequence[np.ndarray], types: Sequence[np.ndarray] | None) -> dict[str, Any]:
        """`input_ids`, `position_ids` and `token_type_ids` (1, T), and a `Packed` as `attention_mask`."""
        lengths = [len(sample) for sample in samples]
        total, longest = sum(lengths), max(lengths)
        padding = min(budget(total), max(total, self.most or budget(total))) - total if self.rounds else 0
        whole, rest = divmod(padding, longest)  # no longer than the texts: positions end somewhere
        lengths += [longest] * whole + [rest] * (rest > 0)
        width = budget(longest) if self.rounds else longest
        offsets = np.fromiter(accumulate(lengths, initial=0), np.int32)
        positions = np.concatenate([np.arange(length) for length in lengths])
        places = np.repeat(np.arange(len(lengths)) * width, lengths) + positions
        packed = Packed(tuple(lengths), len(samples), width, self.move(offsets), self.move(places))
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
        take_rows(accelerator, model, probe.inputs([np.arange(3, 10), np.arange(8, 4, -1)], None))


def budget(tokens: int) -> int:
    """The next of the lengths that a row may have."""
    step = max(8, (1 << (tokens.bit_length() - 1)) // _BUDGETS)
    return -(-tokens // step) * step
