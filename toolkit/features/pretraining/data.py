"""Texts without labels: what of them can be masked, and batches in which it is."""

from __future__ import annotations

import copy
import importlib.metadata
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.data.batches import IGNORED, Batch, Collator
from toolkit.data.progress import Progress
from toolkit.data.read import Table
from toolkit.data.rows import Rows, Targets
from toolkit.data.tokens import Split, growing
from toolkit.errors import UserError
from toolkit.features.pretraining.masks import EVALUATED, FIXED, Draw, choose, counts
from toolkit.features.pretraining.words import starts_of

PROBLEM = "masked_language_modeling"
_SAMPLES = 4096  # that are looked at together


class MaskingCollator(Collator):
    """Sample indices -> a padded `Batch` whose labels are the masked tokens: an evaluation's, or, by `at`, a step's."""

    split: MaskedSplit

    def __init__(
        self, split: Any, tokenizer: Any, device: torch.device, seed: int, probabilities: tuple[float, float]
    ) -> None:
        """`probabilities`: at the first step and at the last."""
        super().__init__(split, tokenizer, device)
        self.seed, self.probabilities, self.draw = seed, probabilities, FIXED
        self.special = special_tokens(tokenizer)
        self.ordinary, self.mask_id = np.flatnonzero(~self.special), int(tokenizer.mask_token_id)

    def at(self, epoch: int, progress: float) -> MaskingCollator:
        step, (first, last) = copy.copy(self), self.probabilities
        step.draw = Draw(self.seed, epoch + 1, first + (last - first) * progress)
        return step

    def loss_denominators(self, indices: np.ndarray) -> np.ndarray:
        return counts(self.split.labels[indices], self.draw.probability)

    def __call__(self, indices: np.ndarray) -> Batch:
        """Inputs `masked_positions` (B, K), the places of the masked tokens in their rows, and `masked_ids` (B, K), the
        tokens that were there, IGNORED where a text has fewer; those are the labels, too."""
        batch = super().__call__(indices)
        masked = [self.masked(int(index)) for index in (indices if len(indices) else [0])]
        width, most = batch.inputs["input_ids"].shape[1], max(1, *(len(places) for _, places, _ in masked))
        shifted = [places + (width - len(ids)) * self.left for ids, places, _ in masked]
        labels = self.padded([truth for *_, truth in masked], most, IGNORED, left=False)  # (B, K)
        inputs = {
            **batch.inputs,
            "input_ids": self.padded([ids for ids, *_ in masked], width, self.pad_id, self.left),
            "masked_positions": self.padded(shifted, most, 0, left=False),
            "masked_ids": labels,
        }
        return replace(batch, inputs=inputs, labels=labels)

    def masked(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens (length,) of which some are replaced, (n,) the places to predict, (n,) the tokens there)."""
        ids, words, row = self.split.tokens(index), self.split.words, int(self.split.rows[index])
        starts = None if words is None else words[self.split.span(index)]
        places, random = choose(self.draw, row, ~self.special[ids], starts)
        truth = ids[places]
        others = self.ordinary[(random[:, 1] * len(self.ordinary)).astype(np.int64)]
        replaced = np.array(ids)
        replaced[places] = np.select([random[:, 0] < 0.8, random[:, 0] < 0.9], [self.mask_id, others], truth)
        return replaced, places, truth


@dataclass(frozen=True)
class MaskedSplit(Split):
    """A split of which tokens are predicted; `labels` (samples,) int64 are how many of each text could be."""

    words: np.ndarray | None = field(default=None, kw_only=True)
    """(tokens,) bool: which of them begin a word; None: each is masked by itself."""

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,) int64: the masked tokens of each, in an evaluation."""
        return counts(self.labels[indices], EVALUATED)


@dataclass(frozen=True)
class Masks(Targets):
    """The tokens of a text itself."""

    whole_word_mask: bool

    column_setting, usual_columns, split_class = None, (), MaskedSplit

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        name = settings.model.model_name_or_path
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"--model_name_or_path {name}: its tokenizer has no mask token: take a masked-language model"
            )
        if settings.masking.whole_word_mask and not tokenizer.is_fast:
            raise UserError(f"--whole_word_mask needs a fast tokenizer, and {name} has a {type(tokenizer).__name__}")

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        return {"words": _segmenter() if settings.masking.whole_word_mask else None}

    @classmethod
    def find(cls, settings: Any, table: Table, text_column: str, rows: np.ndarray | None = None) -> Masks:
        return cls(settings.masking.whole_word_mask)

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """(samples,) int64 that mean nothing: tokens are counted when they are saved."""
        return np.zeros(len(rows), np.int64)

    def all_missing(self, table: Table) -> bool:
        return False

    def trial(self, split: Any) -> tuple[Any, Any]:
        return np.ones((1, 2)), np.ones(1)

    def save(self, folder: Path, rows: Rows, tokenizer: Any) -> list[str]:
        """`labels`, and, for whole words, `words`. Raises UserError where nothing can be masked."""
        special, ids, offsets = (special_tokens(tokenizer), *(np.load(folder / f"{name}.npy", mmap_mode="r")
                                                            for name in ("input_ids", "offsets")))  # fmt: skip
        with growing(folder / "labels.npy", np.int64) as append:
            total = 0
            for start in range(0, len(rows), _SAMPLES):
                ends = offsets[start : start + _SAMPLES + 1]
                ordinary = np.concatenate([[0], np.cumsum(~special[ids[ends[0] : ends[-1]]])])
                append(maskable := np.diff(ordinary[ends - ends[0]]))
                total += int(maskable.sum())
        if not total:
            raise UserError(f"{rows.table.name}: no text of {folder.name} has a token besides those that begin and end "
                            "it, and nothing can be masked: is it the right --text_column?")  # fmt: skip
        if self.whole_word_mask:
            _save_words(folder, rows, tokenizer, int(np.diff(offsets).max()), len(ids))
        return []

    def facts(self) -> dict[str, Any]:
        return {"labels": [], "problem_type": PROBLEM, "whole_word_mask": self.whole_word_mask}

    def describe(self) -> str:
        return f"masked {'whole words' if self.whole_word_mask else 'tokens'}"


def _save_words(folder: Path, rows: Rows, tokenizer: Any, max_length: int, tokens: int) -> None:
    bar, done, saved = Progress(f"words of {folder.name}", len(rows), "texts"), 0, 0
    tokenizer = copy.deepcopy(tokenizer)  # its truncation would stay
    with growing(folder / "words.npy", np.bool_) as append:
        for texts, _ in rows.texts():
            append(starts := np.concatenate([*starts_of(tokenizer, texts, max_length)]))
            done, saved = done + len(texts), saved + len(starts)
            bar.update(done)
    bar.close()
    if saved != tokens:
        raise UserError(f"--whole_word_mask: {type(tokenizer).__name__} makes other tokens with the places of their "
                        "characters than without: leave it out")  # fmt: skip


def _segmenter() -> str:
    try:
        return f"jieba {importlib.metadata.version('jieba')}"
    except importlib.metadata.PackageNotFoundError:
        return "spaces"


def special_tokens(tokenizer: Any) -> np.ndarray:
    """(vocabulary,) bool: tokens that are never masked nor put in the place of others, the unknown one among them."""
    special = np.zeros(max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1), np.bool_)
    special[tokenizer.all_special_ids] = True
    return special
