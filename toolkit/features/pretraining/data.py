"""Texts without labels: which of their tokens are masked, and batches in which they are.

Which they are is decided by the seed, the epoch and the text's row alone. How many follows from the number of its
tokens, so that the loss denominator of a global batch is known before anything is drawn.
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
from toolkit.data.progress import Progress
from toolkit.data.read import Table
from toolkit.data.rows import Rows, Targets
from toolkit.data.tokens import Split, growing
from toolkit.errors import UserError
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, Outputs
from toolkit.features.pretraining.words import word_starts


class Draw(NamedTuple):
    """What decides the masks, beside the row; epochs from 1."""

    seed: int
    epoch: int
    probability: float


FIXED = Draw(0, 0, 0.15)
"""Of evaluations, the same in every run, so that their numbers can be compared."""


def counts(maskable: np.ndarray, probability: float) -> np.ndarray:
    """(samples,) tokens that could be masked -> (samples,) int64 that are: at least 1 where there is any."""
    return np.minimum(np.maximum(np.floor(maskable * probability + 0.5), 1), maskable).astype(np.int64)


def choose(draw: Draw, row: int, maskable: np.ndarray, starts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """((n,) ascending places of the tokens to predict, (n, 2) random numbers below 1 of what becomes of each).

    `maskable` (length,) bool. With `starts` (length,) bool, the tokens that begin a word, whole words are selected in a
    random order, but for those that are longer than what is left to choose; what then remains is the beginning of one.
    """
    key = np.array([draw.seed % 2**64, draw.epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, row, 0, 0], np.uint64)))
    places = np.flatnonzero(maskable)
    count = int(counts(np.array(len(places)), draw.probability))
    words = np.arange(len(places)) if starts is None else np.cumsum(starts)[places]
    _, first, sizes = np.unique(words, return_index=True, return_counts=True)
    order, selected, longer = generator.random(len(first)).argsort(kind="stable"), list[int](), list[int]()
    for begin, size in zip(first[order].tolist(), sizes[order].tolist(), strict=True):
        if size <= count - len(selected):
            selected += range(begin, begin + size)
        else:
            longer.append(begin)
    if left := count - len(selected):
        selected += range(longer[0], longer[0] + left)
    return np.sort(places[selected]), generator.random((count, 2))


@dataclass(frozen=True)
class MaskedSplit(Split):
    """A split of which tokens are predicted; `labels` (samples,) int64 are how many of each text could be."""

    words: np.ndarray | None = field(default=None, kw_only=True)
    """(tokens,) bool: which of them begin a word; None: each is masked by itself."""

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,) int64: the masked tokens of each, in an evaluation."""
        return counts(self.labels[indices], FIXED.probability)


class MaskingCollator(Collator):
    """Sample indices -> a padded `Batch` whose labels are the masked tokens: an evaluation's, or, by `at`, a step's."""

    split: MaskedSplit

    def __init__(self, split: Any, tokenizer: Any, device: torch.device, seed: int, probabilities: Any) -> None:
        """`probabilities`: at the first step and at the last."""
        super().__init__(split, tokenizer, device)
        self.seed, self.probabilities, self.draw = seed, probabilities, FIXED
        self.special, self.mask_id = special_tokens(tokenizer), int(tokenizer.mask_token_id)
        self.ordinary = np.flatnonzero(~self.special)

    def at(self, epoch: int, progress: float) -> MaskingCollator:
        step, (first, last) = copy.copy(self), self.probabilities
        step.draw = Draw(self.seed, epoch + 1, first + (last - first) * progress)
        return step

    def loss_denominators(self, indices: np.ndarray) -> np.ndarray:
        return counts(self.split.labels[indices], self.draw.probability)

    def __call__(self, indices: np.ndarray) -> Batch:
        """Inputs `target_positions` (B, K), the places of the masked tokens in their rows, and `target_ids` (B, K), the
        tokens that were there, IGNORED where a text has fewer; those are the labels, too."""
        batch = super().__call__(indices)
        masked = [self.masked(int(index)) for index in (indices if len(indices) else [0])]
        width, most = batch.inputs["input_ids"].shape[1], max(1, *(len(places) for _, places, _ in masked))
        shifted = [places + (width - len(ids)) * self.left for ids, places, _ in masked]
        labels = self.padded([truth for *_, truth in masked], most, IGNORED, left=False)  # (B, K)
        inputs = {
            "input_ids": self.padded([ids for ids, *_ in masked], width, self.pad_id, self.left),
            "target_positions": self.padded(shifted, most, 0, left=False),
            "target_ids": labels,
        }
        return replace(batch, inputs=batch.inputs | inputs, labels=labels)

    def masked(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens (length,) of which some are replaced, (n,) the places to predict, (n,) the tokens there).

        Of these 80 % become the mask token, 10 % a random one and 10 % stay (Devlin et al. 2019, BERT, section 3.1).
        """
        ids, words = np.array(self.split.tokens(index)), self.split.words
        starts = None if words is None else words[self.split.span(index)]
        places, random = choose(self.draw, int(self.split.rows[index]), ~self.special[ids], starts)
        truth, others = ids[places], self.ordinary[(random[:, 1] * len(self.ordinary)).astype(np.int64)]
        ids[places] = np.select([random[:, 0] < 0.8, random[:, 0] < 0.9], [self.mask_id, others], truth)
        return ids, places, truth


@dataclass(frozen=True)
class Masks(Targets):
    """The tokens of a text itself."""

    whole_word_mask: bool

    column_setting, usual_columns, split_class = None, (), MaskedSplit

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        name = f"--model_name_or_path {settings.model.model_name_or_path}"
        if tokenizer.mask_token_id is None:
            raise UserError(f"{name}: its tokenizer has no mask token: take a masked-language model")
        if settings.masking.whole_word_mask and not tokenizer.is_fast:
            raise UserError(
                f"{name}: a {type(tokenizer).__name__} is not fast, and --whole_word_mask needs one that is"
            )

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        return {"words": load_jieba().name if settings.masking.whole_word_mask else None}

    @classmethod
    def find(cls, settings: Any, table: Table, text_column: str, rows: np.ndarray | None = None) -> Masks:
        return cls(settings.masking.whole_word_mask)

    def trial(self, split: Any) -> tuple[Any, Any]:
        return np.ones((1, 2)), np.ones(1)

    def save(self, folder: Path, rows: Rows, tokenizer: Any) -> list[str]:
        """`labels`, and, for whole words, `words`. Raises UserError where nothing can be masked."""
        ids, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("input_ids", "offsets"))
        ordinary = ~special_tokens(tokenizer)
        maskable = [np.count_nonzero(ordinary[ids[start:end]]) for start, end in itertools.pairwise(offsets.tolist())]
        np.save(folder / "labels.npy", np.array(maskable, np.int64))
        if not any(maskable):
            why = f"no text of {folder.name} has a token besides those that begin and end it, and nothing can be masked"
            raise UserError(f"{rows.table.name}: {why}: is it the right --text_column?")
        if self.whole_word_mask:
            saved = _save_words(folder, rows, copy.deepcopy(tokenizer), int(np.diff(offsets).max()))
            if saved != len(ids):  # it has no places of characters that could be trusted
                raise UserError(f"--whole_word_mask cannot be used with a {type(tokenizer).__name__}: leave it out")
        return []

    def facts(self) -> dict[str, Any]:
        return {"labels": [], "problem_type": "masked_language_modeling", "whole_word_mask": self.whole_word_mask}

    def describe(self) -> str:
        return f"masked {'whole words' if self.whole_word_mask else 'tokens'}"


def _save_words(folder: Path, rows: Rows, tokenizer: Any, max_length: int) -> int:
    """Writes `words`, and returns how many tokens they are."""
    bar, done, tokens = Progress(f"words of {folder.name}", len(rows), "texts"), 0, 0
    with growing(folder / "words.npy", np.bool_) as append:
        for texts, _ in rows.texts():
            encoded = tokenizer(texts, truncation=True, max_length=max_length, return_offsets_mapping=True)
            starts = np.concatenate([*map(word_starts, texts, encoded["offset_mapping"])])
            append(starts)
            done, tokens = done + len(texts), tokens + len(starts)
            bar.update(done)
    bar.close()
    return tokens


def special_tokens(tokenizer: Any) -> np.ndarray:
    """(vocabulary,) bool: tokens that are never masked nor put in the place of others, the unknown one among them."""
    special = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.bool_)
    special[tokenizer.all_special_ids] = True
    return special


def masked_metrics(sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """(N, 2) sums over each text's masked tokens, of losses and of right answers, and (N,) how many they are -> numbers
    of all masked tokens together."""
    loss, right = (sums.sum(axis=0, dtype=np.float64) / counts.sum()).tolist()
    return {"perplexity": math.exp(min(loss, 700)), "masked_accuracy": right, "masked_tokens": int(counts.sum())}


def masked_evaluation(outputs: Outputs, compute_metrics: ComputeMetrics) -> Evaluation:
    """The evaluation of gathered sums (N, 2); every process gets the numbers."""
    if not (arrays := outputs.in_order()):
        return outputs.evaluation()
    (sums,), counts = arrays, outputs.split.loss_denominators()
    lines = partial(_lines, outputs.split, sums, counts.tolist())
    return outputs.evaluation(sums[:, 0], compute_metrics(sums, counts), lines)


def _lines(split: Split, sums: np.ndarray, counts: list[int]) -> Iterator[dict[str, Any]]:
    """Of each text: its masked tokens, their mean loss, and what part of them is right."""
    for row, count, (loss, right) in zip(split.rows, counts, sums.tolist(), strict=True):
        means = round(loss / max(1, count), 6), round(right / max(1, count), 6)
        yield {"id": int(row), "masked_tokens": count, "loss": means[0], "scores": {"masked_accuracy": means[1]}}
