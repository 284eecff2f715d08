"""Masks tokens of unlabelled texts, and collates them.

Which tokens are masked depends on seed, epoch and row only; how many, on the number of tokens only, so that the loss
denominator of a global batch is known in advance.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.data.batches import IGNORED, Batch, Collator
from toolkit.data.jieba_tokenizer import load_jieba
from toolkit.data.table import Rows, Table, Targets
from toolkit.data.tokens import Split, append_to_npy, cut_long_texts
from toolkit.errors import UserError
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, Outputs
from toolkit.features.pretraining.words import word_starts
from toolkit.utils.progress import Progress


class Draw(NamedTuple):
    """What the masks of a row depend on; epochs count from 1."""

    seed: int
    epoch: int
    probability: float


EVALUATION_DRAW = Draw(0, 0, 0.15)
"""Equal in all runs, so that their evaluations can be compared."""


def count_masked(maskable: np.ndarray, probability: float) -> np.ndarray:
    """(samples,) maskable tokens -> (samples,) int64 masked tokens, at least 1 if any is maskable."""
    return np.minimum(np.maximum(np.floor(maskable * probability + 0.5), 1), maskable).astype(np.int64)


def draw_masks(draw: Draw, row: int, maskable: np.ndarray, starts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """((n,) ascending positions of the tokens to predict, (n, 2) uniform random numbers to choose their replacements).

    `maskable` (length,) bool. `starts` (length,) bool: the tokens that begin a word. With it, words are selected in
    random order, except those with more tokens than remain to select; the first tokens of one of these come last.
    """
    key = np.array([draw.seed % 2**64, draw.epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, row, 0, 0], np.uint64)))
    positions = np.flatnonzero(maskable)
    count = int(count_masked(np.array(len(positions)), draw.probability))
    words = np.arange(len(positions)) if starts is None else np.cumsum(starts)[positions]
    _, first, sizes = np.unique(words, return_index=True, return_counts=True)
    order, selected, too_long = generator.random(len(first)).argsort(kind="stable"), list[int](), list[int]()
    for begin, size in zip(first[order].tolist(), sizes[order].tolist(), strict=True):
        if size <= count - len(selected):
            selected += range(begin, begin + size)
        else:
            too_long.append(begin)
    if remaining := count - len(selected):
        selected += range(too_long[0], too_long[0] + remaining)
    return np.sort(positions[selected]), generator.random((count, 2))


@dataclass(frozen=True)
class MaskedSplit(Split):
    """A split for masked-language modelling; `labels` (samples,) int64: the maskable tokens of each text."""

    words: np.ndarray | None = field(default=None, kw_only=True)
    """(tokens,) bool: the first tokens of words; None: single tokens are masked."""

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,) int64: the masked tokens of each sample in an evaluation."""
        return count_masked(self.labels[indices], EVALUATION_DRAW.probability)


class MaskingCollator(Collator):
    """Sample indices -> a padded `Batch` with the masks of evaluations, or, after `at`, of a training step."""

    split: MaskedSplit

    def __init__(self, split: Any, tokenizer: Any, device: torch.device, seed: int, probabilities: Any) -> None:
        """`probabilities`: of masking, at the first and at the last step."""
        super().__init__(split, tokenizer, device)
        self.seed, self.probabilities, self.draw = seed, probabilities, EVALUATION_DRAW
        self.special, self.mask_id = special_tokens(tokenizer), int(tokenizer.mask_token_id)
        self.ordinary = np.flatnonzero(~self.special)

    def at(self, epoch: int, progress: float) -> MaskingCollator:
        step, (first, last) = copy.copy(self), self.probabilities
        step.draw = Draw(self.seed, epoch + 1, first + (last - first) * progress)
        return step

    def loss_denominators(self, indices: np.ndarray) -> np.ndarray:
        return count_masked(self.split.labels[indices], self.draw.probability)

    def __call__(self, indices: np.ndarray) -> Batch:
        """Adds the inputs `target_positions` (B, K), the masked positions, and `target_ids` (B, K), the original tokens
        there, padded with IGNORED, which are also the labels."""
        batch = super().__call__(indices)
        masked = [self.mask_tokens(int(index)) for index in (indices if len(indices) else [0])]
        width, most = batch.inputs["input_ids"].shape[1], max(1, *(len(positions) for _, positions, _ in masked))
        shifted = [positions + (width - len(ids)) * self.left for ids, positions, _ in masked]
        labels = self.padded([truth for *_, truth in masked], most, IGNORED, left=False)  # (B, K)
        inputs = {
            "input_ids": self.padded([ids for ids, *_ in masked], width, self.pad_id, self.left),
            "target_positions": self.padded(shifted, most, 0, left=False),
            "target_ids": labels,
        }
        return replace(batch, inputs=batch.inputs | inputs, labels=labels)

    def mask_tokens(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """((length,) ids after masking, (n,) positions to predict, (n,) original ids there): 80 % become the mask
        token, 10 % a random token, and 10 % stay (Devlin et al. 2019, BERT, section 3.1)."""
        ids, words = np.array(self.split.tokens(index)), self.split.words
        starts = None if words is None else words[self.split.span(index)]
        positions, random = draw_masks(self.draw, int(self.split.rows[index]), ~self.special[ids], starts)
        truth, others = ids[positions], self.ordinary[(random[:, 1] * len(self.ordinary)).astype(np.int64)]
        ids[positions] = np.select([random[:, 0] < 0.8, random[:, 0] < 0.9], [self.mask_id, others], truth)
        return ids, positions, truth


@dataclass(frozen=True)
class Masks(Targets):
    """Masked tokens of the text itself."""

    whole_word_mask: bool

    column_setting, usual_columns, split_class = None, (), MaskedSplit

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        name = f"--model_name_or_path {settings.model.model_name_or_path}"
        if smoothing := settings.training.label_smoothing_factor:
            raise UserError(f"--label_smoothing_factor {smoothing} has no effect in pretraining: leave it out")
        if tokenizer.mask_token_id is None:
            raise UserError(f"{name}: its tokenizer has no mask token: take a masked-language model")
        if settings.masking.whole_word_mask and not tokenizer.is_fast:
            raise UserError(f"{name}: --whole_word_mask needs a fast tokenizer, and {type(tokenizer).__name__} is slow")

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        return {"words": load_jieba().name if settings.masking.whole_word_mask else None}

    @classmethod
    def find(cls, settings: Any, table: Table, text_column: str, rows: np.ndarray | None = None) -> Masks:
        return cls(settings.masking.whole_word_mask)

    def trial(self, split: Any) -> tuple[Any, Any]:
        return np.ones((1, 2)), np.ones(1)

    def save(self, folder: Path, rows: Rows, tokenizer: Any) -> list[str]:
        """Writes `labels`, and, for whole words, `words`. Raises UserError if no token is maskable."""
        ids, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("input_ids", "offsets"))
        ordinary = ~special_tokens(tokenizer)
        maskable = [np.count_nonzero(ordinary[ids[start:end]]) for start, end in itertools.pairwise(offsets.tolist())]
        np.save(folder / "labels.npy", np.array(maskable, np.int64))
        if not any(maskable):
            raise UserError(f"{rows.table.name}: the texts of {folder.name} consist of special tokens only: is it the "
                            "right --text_column?")  # fmt: skip
        if self.whole_word_mask:
            saved = _save_words(folder, rows, copy.deepcopy(tokenizer), int(np.diff(offsets).max()))
            if saved != len(ids):
                name = type(tokenizer).__name__
                raise UserError(f"--whole_word_mask: the character offsets of {name} are wrong: leave it out")
        return []

    def facts(self) -> dict[str, Any]:
        return {"labels": [], "problem_type": "masked_language_modeling", "whole_word_mask": self.whole_word_mask}

    def describe(self) -> str:
        return f"masked {'whole words' if self.whole_word_mask else 'tokens'}"


def _save_words(folder: Path, rows: Rows, tokenizer: Any, max_length: int) -> int:
    """Writes `words`, and returns its number of tokens."""
    bar, done, tokens = Progress(f"words of {folder.name}", len(rows), "texts"), 0, 0
    tokenizer(["a"], truncation=True, max_length=max_length)  # sets the truncation, for `cut_long_texts`
    with append_to_npy(folder / "words.npy", np.bool_) as append:
        for whole, _ in rows.texts():
            texts = list(cut_long_texts(tokenizer, whole, max_length))
            encoded = tokenizer(texts, truncation=True, max_length=max_length, return_offsets_mapping=True)
            starts = np.concatenate([*map(word_starts, texts, encoded["offset_mapping"])])
            append(starts)
            done, tokens = done + len(texts), tokens + len(starts)
            bar.update(done)
    bar.close()
    return tokens


def special_tokens(tokenizer: Any) -> np.ndarray:
    """(vocabulary,) bool: special tokens, [UNK] included, which are never masked nor drawn as replacements."""
    special = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.bool_)
    special[tokenizer.all_special_ids] = True
    return special


def masked_metrics(sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """(N, 2) sums of losses and of correct predictions over each text's masked tokens, and (N,) their counts -> metrics
    over all masked tokens."""
    loss, right = (sums.sum(axis=0, dtype=np.float64) / counts.sum()).tolist()
    return {"perplexity": math.exp(min(loss, 700)), "masked_accuracy": right, "masked_tokens": int(counts.sum())}


def masked_evaluation(outputs: Outputs, compute_metrics: ComputeMetrics) -> Evaluation:
    """The evaluation from gathered sums (N, 2); all ranks get the metrics."""
    if not (arrays := outputs.in_order()):
        return outputs.evaluation()
    (sums,), counts = arrays, outputs.split.loss_denominators()
    lines = partial(_lines, outputs.split, sums, counts.tolist())
    return outputs.evaluation(sums[:, 0], compute_metrics(sums, counts), lines)


def _lines(split: Split, sums: np.ndarray, counts: list[int]) -> Iterator[dict[str, Any]]:
    for row, count, (loss, right) in zip(split.rows, counts, sums.tolist(), strict=True):
        loss, right = round(loss / max(1, count), 6), round(right / max(1, count), 6)
        scores = {"scores": {"masked_accuracy": right}, "weight": count}
        yield {"id": int(row), "masked_tokens": count, "loss": loss, **scores}
