"""Masks tokens of unlabelled texts, and collates them.

Which tokens are masked depends on seed, epoch and row only: every rank draws the masks of the whole
global batch, and so knows its loss denominator.
"""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.data.batches import IGNORED, Batch, Collator
from toolkit.data.encode import append_to_npy, cut_long_texts
from toolkit.data.jieba_tokenizer import load_jieba
from toolkit.data.table import Table
from toolkit.data.targets import Targets
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, Outputs
from toolkit.features.pretraining.words import word_starts
from toolkit.pretrained import load_config
from toolkit.utils.progress import Progress

_COUNTED_ROWS = 4096


class Draw(NamedTuple):
    """What the masks of a row depend on; epochs count from 1."""

    seed: int
    epoch: int
    probability: float


EVALUATION_DRAW = Draw(0, 0, 0.15)
"""Equal in all runs, so that their evaluations can be compared."""


def draw_masks(
    draw: Draw,
    rows: np.ndarray,
    lengths: np.ndarray,
    maskable: np.ndarray,
    starts: np.ndarray | None,
) -> np.ndarray:
    """(T,) bool: the tokens to predict, of samples one after another.

    `rows` and `lengths` (samples,); `maskable` (T,) bool; `starts` (T,) bool: the tokens that begin
    a word; None: each token is a word. A word is masked, all of its maskable tokens, with the
    probability of the draw; of a sample without any such word the one that came closest."""
    numbers = uniform_numbers(draw, 0, rows, lengths)
    begins = lengths.cumsum() - lengths
    if starts is not None:
        starts = starts.copy()
        starts[begins] = True
        places = np.arange(len(numbers))
        numbers = numbers[np.maximum.accumulate(np.where(starts, places, 0))]
    lowest = np.minimum.reduceat(np.where(maskable, numbers, np.inf), begins)
    limits = np.repeat(np.maximum(lowest, draw.probability), lengths)
    return maskable & (numbers <= limits)


def uniform_numbers(draw: Draw, stream: int, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(T,) uniform random numbers, one for each token of samples one after another, which depend on
    the seed, the epoch, the row and the number of the stream."""
    philox = np.random.Philox(key=np.array([draw.seed % 2**64, draw.epoch], np.uint64))
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
    """A split for masked-language modelling; `labels` (samples,) int64: the masked tokens of each
    text in an evaluation."""

    words: np.ndarray | None = field(default=None, kw_only=True)
    """(tokens,) bool: the first tokens of words; None: single tokens are masked."""

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,) int64: the masked tokens of each sample in an evaluation."""
        counts: np.ndarray = self.labels[indices]
        return counts


class MaskingCollator(Collator):
    """Sample indices -> a padded `Batch` with the masks of evaluations, or, after `at`, of a
    training step."""

    split: MaskedSplit

    def __init__(
        self, split: Any, tokenizer: Any, device: torch.device, seed: int, probability: float
    ) -> None:
        """`probability`: of masking, in training."""
        super().__init__(split, tokenizer, device)
        self.seed = seed
        self.probability = probability
        self.draw = EVALUATION_DRAW
        self.special = special_tokens(tokenizer)
        self.mask_id = int(tokenizer.mask_token_id)
        self.ordinary = np.flatnonzero(~self.special)

    def at(self, epoch: int) -> MaskingCollator:
        step = copy.copy(self)
        step.draw = Draw(self.seed, epoch + 1, self.probability)
        return step

    def loss_denominators(self, indices: np.ndarray) -> np.ndarray:
        """(samples,) int64: the masked tokens of each sample."""
        _, is_masked = self._masks(indices)
        return _count(is_masked, self.split.lengths[indices])

    def __call__(self, indices: np.ndarray) -> Batch:
        """Adds the inputs `target_positions` (B, K), the masked positions, and `target_ids` (B, K),
        the original tokens there, padded with IGNORED, which are also the labels."""
        batch = super().__call__(indices)
        if not len(indices):
            indices = np.zeros(1, np.int64)
        lengths = self.split.lengths[indices]
        width = batch.inputs["input_ids"].shape[1]
        ids, is_masked, truth = self.mask_tokens(indices)
        starts = lengths.cumsum() - lengths
        if self.left:
            starts = starts - (width - lengths)  # the padding comes first
        positions = np.flatnonzero(is_masked) - np.repeat(starts, lengths)[is_masked]
        counts = _count(is_masked, lengths)
        most = max(1, int(counts.max()))
        labels = self.padded(truth, counts, most, IGNORED, left=False)  # (B, K)
        inputs = {
            "input_ids": self.padded(ids, lengths, width, self.pad_id, self.left),
            "target_positions": self.padded(positions, counts, most, 0, left=False),
            "target_ids": labels,
        }
        return replace(batch, inputs=batch.inputs | inputs, labels=labels)

    def mask_tokens(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of these samples, one after another: ((T,) ids after masking, (T,) bool, the tokens to
        predict, (n,) their original ids): 80 % become the mask token, 10 % a random token, and 10 %
        stay (Devlin et al. 2019, BERT, section 3.1)."""
        ids, is_masked = self._masks(indices)
        sample = (self.split.rows[indices], self.split.lengths[indices])
        action = uniform_numbers(self.draw, 1, *sample)[is_masked]
        choice = uniform_numbers(self.draw, 2, *sample)[is_masked]
        truth = ids[is_masked]
        others = self.ordinary[(choice * len(self.ordinary)).astype(np.int64)]
        ids[is_masked] = np.select([action < 0.8, action < 0.9], [self.mask_id, others], truth)
        return ids, is_masked, truth

    def _masks(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """((T,) ids, (T,) bool, the tokens to predict) of these samples, one after another."""
        split = self.split
        ids = split.gather(split.input_ids, indices)
        starts = None
        if split.words is not None:
            starts = split.gather(split.words, indices)
        rows = split.rows[indices]
        lengths = split.lengths[indices]
        return ids, draw_masks(self.draw, rows, lengths, ~self.special[ids], starts)


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
        return partial(MaskingCollator, seed=settings.training.seed, probability=probability)

    @classmethod
    def next_command(cls, settings: Any, folder: Path) -> str | None:
        kind = load_config(settings.model).model_type
        recipe = "bigbird" if kind == "big_bird" else "cls"
        model = shlex.quote(str(folder / "model"))
        return f"python recipes/{recipe}.py --model_name_or_path {model} --train_file YOUR_FILE.csv"

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        name = f"model {settings.model.model_name_or_path}"
        if settings.training.label_smoothing_factor:
            fault = "--label_smoothing_factor has no effect in pretraining"
            raise UserError(f"{fault}: leave it out")
        if tokenizer.mask_token_id is None:
            fault = "its tokenizer has no mask token"
            raise UserError(f"{name}: {fault}: take a masked-language model")
        if settings.masking.whole_word_mask and not tokenizer.is_fast:
            kind = type(tokenizer).__name__
            raise UserError(f"{name}: --whole_word_mask needs a fast tokenizer, and {kind} is slow")

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        if settings.masking.whole_word_mask:
            return {"words": load_jieba().name}
        return {"words": None}

    @classmethod
    def find(cls, settings: Any, table: Table, text_column: str) -> Masks:
        return cls(settings.masking.whole_word_mask)

    def save(self, folder: Path, table: Table, encoded: np.ndarray, tokenizer: Any) -> list[str]:
        """Writes `labels`, and, for whole words, `words`. Raises UserError if no token is
        maskable."""
        ids = np.load(folder / "input_ids.npy", mmap_mode="r")
        offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        words = None
        if self.whole_word_mask:
            longest = int(np.diff(offsets).max())
            saved = _save_words(folder, table, copy.deepcopy(tokenizer), longest)
            if saved != len(ids):
                name = type(tokenizer).__name__
                fault = f"the character offsets of {name} are wrong"
                raise UserError(f"--whole_word_mask: {fault}: leave it out")
            words = np.load(folder / "words.npy", mmap_mode="r")
        ordinary = ~special_tokens(tokenizer)
        counts = _counts_in_evaluations(ids, offsets, table.row_numbers, words, ordinary)
        np.save(folder / "labels.npy", counts)
        if not counts.any():
            fault = f"the texts of {folder.name} are special and unknown tokens only"
            remedy = "name the --text_column, or take a model for their language"
            raise UserError(f"{table.name}: {fault}: {remedy}")
        return []

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


def _counts_in_evaluations(
    ids: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    words: np.ndarray | None,
    ordinary: np.ndarray,
) -> np.ndarray:
    """(samples,) int64: the tokens that `EVALUATION_DRAW` masks; thousands of samples at a time."""
    parts = []
    for first in range(0, len(rows), _COUNTED_ROWS):
        bounds = offsets[first : first + _COUNTED_ROWS + 1]
        span = slice(int(bounds[0]), int(bounds[-1]))
        lengths = np.diff(bounds)
        starts = words[span] if words is not None else None
        numbers = rows[first : first + len(lengths)]
        is_masked = draw_masks(EVALUATION_DRAW, numbers, lengths, ordinary[ids[span]], starts)
        parts.append(_count(is_masked, lengths))
    return np.concatenate(parts)


def _save_words(folder: Path, table: Table, tokenizer: Any, max_length: int) -> int:
    """Writes `words`, and returns its number of tokens."""
    bar = Progress(f"words of {folder.name}", len(table), "texts")
    texts_done = 0
    tokens = 0
    # sets the truncation, for `cut_long_texts`
    tokenizer(["a"], truncation=True, max_length=max_length)
    with append_to_npy(folder / "words.npy", np.bool_) as append:
        for whole, _ in table.texts():
            texts = list(cut_long_texts(tokenizer, whole, max_length))
            encoded = tokenizer(
                texts, truncation=True, max_length=max_length, return_offsets_mapping=True
            )
            starts = np.concatenate([*map(word_starts, texts, encoded["offset_mapping"])])
            append(starts)
            texts_done += len(texts)
            tokens += len(starts)
            bar.update(texts_done)
    bar.close()
    return tokens


def special_tokens(tokenizer: Any) -> np.ndarray:
    """(vocabulary,) bool: special tokens, [UNK] included, which are never masked nor drawn as
    replacements."""
    special = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.bool_)
    special[tokenizer.all_special_ids] = True
    return special


def masked_metrics(sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """(N, 2) sums of losses and of correct predictions over each text's masked tokens, and (N,)
    their counts -> metrics over all masked tokens."""
    loss, right = (sums.sum(axis=0, dtype=np.float64) / counts.sum()).tolist()
    return {
        "perplexity": math.exp(min(loss, 700)),
        "masked_accuracy": right,
        "masked_tokens": int(counts.sum()),
    }


def masked_evaluation(outputs: Outputs, compute_metrics: ComputeMetrics) -> Evaluation:
    """The evaluation from gathered sums (N, 2); all ranks get the metrics."""
    arrays = outputs.in_order()
    if not arrays:
        return outputs.make_evaluation()
    (sums,) = arrays
    counts = outputs.split.loss_denominators()
    lines = partial(_lines, outputs.split, sums, counts.tolist())
    return outputs.make_evaluation(sums[:, 0], compute_metrics(sums, counts), lines)


def _lines(split: Split, sums: np.ndarray, counts: list[int]) -> Iterator[dict[str, Any]]:
    for row, count, (loss, right) in zip(split.rows, counts, sums.tolist(), strict=True):
        tokens = max(1, count)
        yield {
            "id": int(row),
            "masked_tokens": count,
            "loss": round(loss / tokens, 6),
            "scores": {"masked_accuracy": round(right / tokens, 6)},
            "weight": count,
        }
