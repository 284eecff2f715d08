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

    def __init__(self, split: Any, tokenizer: Any, device: torch.device) -> None:
        super().__init__(split, tokenizer, device)
        self.rounds_up = device.type != "cpu"

    def __call__(self, indices: np.ndarray) -> Batch:
        """Adds which text each token belongs to, padding texts last."""
        batch = super().__call__(indices)
        lengths = cast(Packed, batch.inputs["attention_mask"]).lengths
        text_of = np.repeat(np.arange(len(lengths)), lengths)
        return replace(batch, token_samples=self.move(text_of[None]))

    def inputs(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        types: np.ndarray | None,
    ) -> dict[str, Any]:
        """(T,) tokens and token types of texts one after another, (B,) their lengths ->
        `input_ids`, `position_ids` and `token_type_ids` (1, T), and a `Packed` as
        `attention_mask`."""
        num_texts = len(lengths)
        longest = int(lengths.max())
        width = longest
        total = len(tokens)
        if self.rounds_up:
            width = round_up(longest)
            total = round_up(total)
        # padding texts are no longer than the others: positions are limited
        padding_texts = np.diff([*range(len(tokens), total, longest), total])
        lengths = np.append(lengths, padding_texts).astype(np.int64)
        starts = np.append(0, lengths.cumsum())
        positions = np.arange(total) - np.repeat(starts[:-1], lengths)
        first_places = np.arange(len(lengths)) * width
        packed = Packed(
            lengths=tuple(lengths.tolist()),
            num_texts=num_texts,
            width=width,
            cu_seqlens=self.move(starts.astype(np.int32)),
            padded_indices=self.move(np.repeat(first_places, lengths) + positions),
        )
        row = (np.array([len(tokens)]), total)
        inputs = {
            "input_ids": self.padded(tokens, *row, self.pad_id, left=False),
            "position_ids": self.move(positions[None]),
            "attention_mask": packed,
        }
        if types is not None:
            inputs["token_type_ids"] = self.padded(types, *row, self.pad_type, left=False)
        return inputs

    def prepare_model(self, accelerator: Any, model: Any) -> None:
        """Makes the model accept these batches, proven by two made-up texts. Raises UserError if it
        cannot."""
        probe = copy.copy(self)
        probe.device = next(model.parameters()).device
        config = getattr(model, "config", None)
        window = getattr(config, "local_attention", None) or 0  # ModernBERT's
        lengths = np.array([window + 7, 4])  # one text is longer than a window
        tokens = 3 + np.arange(lengths.sum()) % 9
        accept_packed(model, probe.inputs(tokens, lengths, None))


def round_up(tokens: int) -> int:
    """The next of the lengths that rows have on a GPU."""
    step = max(8, (1 << (tokens.bit_length() - 1)) // _LENGTHS)
    return -(-tokens // step) * step
