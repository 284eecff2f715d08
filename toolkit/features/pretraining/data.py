"""Masks tokens of unlabelled texts, and collates them.

Which tokens are masked depends on seed, epoch and row only: every rank draws the masks of the whole
global batch, and so knows its loss denominator.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.data.batches import IGNORED, Batch, Collator
from toolkit.data.encode import cut_long_texts
from toolkit.data.jieba_tokenizer import load_jieba
from toolkit.data.table import Table
from toolkit.data.targets import Targets
from toolkit.data.token_files import append_to_npy
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.evaluation.outputs import Evaluation, Outputs
from toolkit.features.pretraining.words import word_starts
from toolkit.utils.progress import Progress


class Draw(NamedTuple):
    """What the masks of a row depend on; epochs count from 1."""

    seed: int
    epoch: int
    probability: float


EVALUATION_DRAW = Draw(0, 0, 0.15)
"""Equal in all runs, so that their evaluations can be compared."""
_GUESSING = 0.95
"""Of ln(vocabulary), the loss of a model that knows nothing: a pretrained one starts far below."""


def draw_masks(
    draw: Draw,
    rows: np.ndarray,
    lengths: np.ndarray,
    maskable: np.ndarray,
    starts: np.ndarray | None,
) -> np.ndarray:
    """(T,) bool: the tokens to predict, of samples one after another.

    `rows` and `lengths` (samples,); `maskable` (T,) bool; `starts` (T,) bool: the tokens that begin
    a word, the first of each sample included; None: each token is a word. A word is masked, all of
    its maskable tokens, with the probability of the draw; of a sample without any such word the one
    that came closest."""
    numbers = uniform_numbers(draw, 0, rows, lengths)
    begins = lengths.cumsum() - lengths
    if starts is not None:
        places = np.arange(len(numbers))
        numbers = numbers[np.maximum.accumulate(np.where(starts, places, 0))]
    lowest = np.minimum.reduceat(np.where(maskable, numbers, np.inf), begins)
    limits = np.repeat(np.maximum(lowest, draw.probability), lengths)
    return maskable & (numbers <= limits)


def uniform_numbers(
    draw: Draw,
    stream: int,
    rows: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray:
    """(T,) uniform random numbers, one for each token of samples one after another, which depend on
    the seed, the epoch, the row and the number of the stream."""
    philox = np.random.Philox(key=np.array([draw.seed, draw.epoch], np.uint64))
    generator = np.random.Generator(philox)
    state = philox.state
    parts = []
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        state["state"]["counter"] = np.array([0, row, stream, 0], np.uint64)
        philox.state = state  # a third of the time of a new generator
        parts.append(generator.random(length))
    return np.concatenate(parts)


@dataclass(frozen=True)
class MaskedSplit(Split):
    """A split for masked-language modelling; it has no labels."""

    words: np.ndarray | None = field(default=None, kw_only=True)
    """(tokens,) bool: the first tokens of words; None: single tokens are masked."""


class MaskingCollator(Collator):
    """Sample indices -> a padded `Batch` with the masks of evaluations, or, after `at`, of a
    training step."""

    split: MaskedSplit

    def __init__(
        self,
        split: Any,
        tokenizer: Any,
        device: torch.device,
        seed: int,
        probability: float,
    ) -> None:
        """`seed`, `probability`: of the masks in training."""
        super().__init__(split, tokenizer, device)
        self.left = False  # encoders count positions from the left
        self.seed = seed
        self.probability = probability
        self.draw = EVALUATION_DRAW
        self.mask_id = int(tokenizer.mask_token_id)
        self.is_ordinary = ordinary_tokens(tokenizer)
        self.ordinary_ids = np.flatnonzero(self.is_ordinary)

    def at(self, epoch: int) -> MaskingCollator:
        """With the masks of this epoch of the training."""
        step = copy.copy(self)
        step.draw = Draw(self.seed, epoch + 1, self.probability)
        return step

    def loss_denominators(self, indices: np.ndarray) -> np.ndarray:
        """(samples,) int64: the masked tokens of each sample."""
        return _count(self.masks(indices), self.split.lengths[indices])

    def __call__(self, indices: np.ndarray) -> Batch:
        """The labels (B, K) are the original tokens at the masked positions, which are the input
        `target_positions` (B, K), padded with IGNORED."""
        batch = super().__call__(indices)
        lengths = self.split.lengths[indices]
        is_masked = self.masks(indices)
        ids = self.split.gather(self.split.input_ids, indices)
        truth = ids[is_masked]
        ids[is_masked] = self._replacements(indices, is_masked, truth)
        starts = lengths.cumsum() - lengths
        positions = np.flatnonzero(is_masked) - np.repeat(starts, lengths)[is_masked]
        counts = _count(is_masked, lengths)
        most = max(1, int(counts.max()))
        width = batch.inputs["input_ids"].shape[1]
        inputs = {
            "input_ids": self.padded(ids, lengths, width, self.pad_id, self.left),
            "target_positions": self.padded(positions, counts, most, 0, self.left),
        }
        labels = self.padded(truth, counts, most, IGNORED, self.left)
        return replace(batch, inputs=batch.inputs | inputs, labels=labels)

    def masks(self, indices: np.ndarray) -> np.ndarray:
        """(T,) bool: the tokens to predict of these samples, one after another."""
        split = self.split
        starts = None
        if split.words is not None:
            starts = split.gather(split.words, indices)
        maskable = self.is_ordinary[split.gather(split.input_ids, indices)]
        return draw_masks(
            self.draw, split.rows[indices], split.lengths[indices], maskable, starts
        )

    def _replacements(
        self,
        indices: np.ndarray,
        is_masked: np.ndarray,
        truth: np.ndarray,
    ) -> np.ndarray:
        """What stands in place of the masked tokens `truth`: of 80 % the mask token, of 10 % a
        random token, and 10 % stay (Devlin et al. 2019, BERT, section 3.1)."""
        samples = (self.split.rows[indices], self.split.lengths[indices])
        action = uniform_numbers(self.draw, 1, *samples)[is_masked]
        choice = uniform_numbers(self.draw, 2, *samples)[is_masked]
        others = self.ordinary_ids[(choice * len(self.ordinary_ids)).astype(np.int64)]
        return np.select([action < 0.8, action < 0.9], [self.mask_id, others], truth)


def _count(is_masked: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(T,) bool of samples one after another -> (samples,) int64."""
    return np.add.reduceat(is_masked, lengths.cumsum() - lengths, dtype=np.int64)


@dataclass(frozen=True)
class Masks(Targets):
    """Masked tokens of the text itself."""

    whole_word_mask: bool

    column_setting = None
    usual_columns = ()
    split_class = MaskedSplit
    pipeline_tag = "fill-mask"

    @classmethod
    def collator(cls, settings: Any) -> Any:
        probability = settings.masking.mlm_probability
        return partial(
            MaskingCollator, seed=settings.training.seed, probability=probability
        )

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        if tokenizer.mask_token_id is None:
            name = settings.model.model_name_or_path
            fault = f"model {name}: its tokenizer has no mask token"
            raise UserError(f"{fault}: take a masked-language model")

    @classmethod
    def first_loss_note(cls, settings: Any, tokenizer: Any, loss: float) -> str | None:
        guessing = math.log(len(tokenizer))
        if settings.model.new_head or loss < _GUESSING * guessing:
            return None
        return (
            f"the loss of step 1, {loss:.2f}, is no better than guessing (ln {len(tokenizer)} is "
            f"{guessing:.2f}), and {settings.model.model_name_or_path} calls itself pretrained: its weights, its "
            "config.json or its tokenizer may be another model's: take all from one place"
        )

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        if settings.masking.whole_word_mask:
            return {"words": load_jieba().name}
        return {"words": None}

    @classmethod
    def find(cls, settings: Any, table: Table, columns: tuple[str, ...]) -> Masks:
        return cls(settings.masking.whole_word_mask)

    def save(
        self, folder: Path, table: Table, encoded: np.ndarray, tokenizer: Any
    ) -> list[str]:
        """Writes `words` if whole words are masked."""
        if self.whole_word_mask:
            _save_words(folder, table, copy.deepcopy(tokenizer))
        return super().save(folder, table, encoded, tokenizer)

    def facts(self) -> dict[str, Any]:
        return {
            "labels": [],
            "problem_type": "masked_language_modeling",
            "whole_word_mask": self.whole_word_mask,
        }

    def describe(self) -> str:
        if self.whole_word_mask:
            return "masked whole words"
        return "masked tokens"


def _save_words(folder: Path, table: Table, tokenizer: Any) -> None:
    """Writes `words`, for the tokens that the folder has."""
    max_length = int(np.diff(np.load(folder / "offsets.npy")).max())
    options = {"truncation": True, "max_length": max_length}
    tokenizer(["a"], **options)  # sets the truncation, for `cut_long_texts`
    bar = Progress(f"words of {folder.name}", len(table), "texts")
    texts_done = 0
    with append_to_npy(folder / "words.npy", np.bool_) as append:
        for (block,) in table.texts():
            texts = cut_long_texts(tokenizer, block, max_length)
            encoded = tokenizer(list(texts), return_offsets_mapping=True, **options)
            for text, offsets in zip(texts, encoded["offset_mapping"], strict=True):
                append(word_starts(text, offsets))
            texts_done += len(texts)
            bar.update(texts_done)
    bar.close()


def ordinary_tokens(tokenizer: Any) -> np.ndarray:
    """(vocabulary,) bool: false for special tokens, [UNK] included, which are never masked nor
    drawn as replacements."""
    is_ordinary = np.ones(max(tokenizer.get_vocab().values()) + 1, np.bool_)
    is_ordinary[tokenizer.all_special_ids] = False
    return is_ordinary


def masked_metrics(sums: np.ndarray) -> dict[str, Any]:
    """(N, 3) of `masked_sums` -> metrics over all masked tokens."""
    loss, correct, count = sums.sum(axis=0).tolist()
    tokens = max(1, count)  # a trial's texts may have none
    return {
        "perplexity": math.exp(min(loss / tokens, 700)),
        "masked_accuracy": correct / tokens,
        "masked_tokens": int(count),
    }


def masked_evaluation(
    outputs: Outputs,
    compute_metrics: Callable[[np.ndarray], dict[str, Any]],
) -> Evaluation:
    """The evaluation from gathered `masked_sums` (N, 3); all ranks get the metrics."""
    arrays = outputs.in_order()
    if not arrays:
        return outputs.make_evaluation()
    sums = arrays[0].astype(np.float64)
    lines = partial(_lines, outputs.split.rows, sums)
    return outputs.make_evaluation(sums[:, 0], compute_metrics(sums), lines)


def _lines(rows: np.ndarray, sums: np.ndarray) -> Iterator[dict[str, Any]]:
    """The lines of predictions.jsonl; `weight`: of the text in a mean over masked tokens."""
    for row, (loss, correct, tokens) in zip(rows.tolist(), sums.tolist(), strict=True):
        count = max(1, tokens)  # a text of unknown characters has none
        yield {
            "id": row,
            "masked_tokens": int(tokens),
            "loss": loss / count,
            "scores": {"masked_accuracy": correct / count},
            "weight": int(tokens),
        }
