"""Batches of one row: the texts of a micro-batch end to end, without padding."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from toolkit.data.batches import Batch, Collator
from toolkit.features.padding_free.attention import Packed, accept_packed

_LENGTHS = 8
"""Row lengths on a GPU from one power of two to the next: at most 1/8 of a row is padding, 1/25 on
average."""


class PackedCollator(Collator):
    """Sample indices -> a `Batch` of one row. On a GPU texts of padding fill it to one of few
    lengths (`round_up`), for kernels, compiled layers and the caching allocator."""

    def __init__(
        self, split: Any, tokenizer: Any, device: torch.device, max_tokens: int | None = None
    ) -> None:
        """`max_tokens`: no padding beyond this length of a row."""
        super().__init__(split, tokenizer, device)
        self.max_tokens = max_tokens
        self.rounds_up = device.type != "cpu"

    def __call__(self, indices: np.ndarray) -> Batch:
        batch = super().__call__(indices)
        lengths = cast(Packed, batch.inputs["attention_mask"]).lengths
        text_of = np.repeat(np.arange(len(lengths)), lengths)
        return replace(batch, token_samples=self.move(text_of[None]))

    def inputs(
        self, tokens: np.ndarray, lengths: np.ndarray, types: np.ndarray | None
    ) -> dict[str, Any]:
        """`input_ids`, `position_ids` and `token_type_ids` (1, T), and a `Packed` as
        `attention_mask`."""
        num_texts, longest = len(lengths), int(lengths.max())
        width, total = longest, len(tokens)
        if self.rounds_up:
            width = round_up(longest)
            limit = self.max_tokens or round_up(total)
            total = max(total, min(round_up(total), limit))
        # padding texts are no longer than the others: positions are limited
        padding_texts = np.diff([*range(len(tokens), total, longest), total])
        lengths = np.append(lengths, padding_texts).astype(np.int64)
        starts = np.append(0, lengths.cumsum())
        positions = np.arange(total) - np.repeat(starts[:-1], lengths)
        places = self.move(np.repeat(np.arange(len(lengths)) * width, lengths) + positions)
        cu_seqlens = self.move(starts.astype(np.int32))
        row = (np.array([len(tokens)]), total)
        inputs = {
            "input_ids": self.padded(tokens, *row, self.pad_id, left=False),
            "position_ids": self.move(positions[None]),
            "attention_mask": Packed(tuple(lengths.tolist()), num_texts, width, cu_seqlens, places),
        }
        if types is not None:
            inputs["token_type_ids"] = self.padded(types, *row, self.pad_type, left=False)
        return inputs

    def prepare_model(self, accelerator: Any, model: Any) -> None:
        probe = copy.copy(self)
        probe.device = next(model.parameters()).device
        config = getattr(model, "config", None)
        window = getattr(config, "local_attention", None) or 0  # ModernBERT's
        lengths = np.array([window + 7, 4])  # one text is longer than a window
        tokens = 3 + np.arange(lengths.sum()) % 9
        accept_packed(model, probe.inputs(tokens, lengths, None))


def round_up(tokens: int) -> int:
    step = max(8, (1 << (tokens.bit_length() - 1)) // _LENGTHS)
    return -(-tokens // step) * step
