"""Masks tokens of unlabelled texts, and collates them.

Which tokens are masked depends on seed, epoch and row only; how many, on the number of tokens only, so that the loss
denominator of a global batch is known in advance.
"""

from __future__ import annotations

import copy
import itertools
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
from toolkit.data.jieba_tokenizer import load_jieba
from toolkit.data.table import Rows, Table
from toolkit.data.targets import Targets
from toolkit.data.tokens import Split, append_to_npy, cut_long_texts
from toolkit.errors import UserError
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, Outputs
from toolkit.features.pretraining.words import word_starts
from toolkit.pretrained import load_config
from toolkit.utils.progress import Progress

_MASKED_30_PERCENT = ("modernbert", "eurobert")  # at least, in their pretraining


class Draw(NamedTuple):
    """What the masks of a row depend on; epochs count from 1."""

    seed: int
    epoch: int
    probability: float


EVALUATION_DRAW = Draw(0, 0, 0.15)
"""Equal in all runs, so that their evaluations can be compared."""


def count_masked(maskable: np.ndarray, probability: float) -> np.ndarray:
    """(samples,) maskable tokens -> (samples,) int64 masked tokens, at least 1 if any is maskable."""
    return np.minimum(np.maximum(np.floor(maskable * probability + 0.5), 1), maskable).astype(
        np.int64
    )


def draw_masks(
    draw: Draw,
    rows: np.ndarray,
    lengths: np.ndarray,
    maskable: np.ndarray,
    starts: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """((T,) bool, the tokens to predict, of samples one after another; (n, 2) uniform random numbers, to choose the
    replacements of these n tokens).

    `rows` and `lengths` (samples,); `maskable` (T,) bool; `starts` (T,) bool: the tokens that begin a word. With it,
    words are selected in random order, except those with more tokens than remain to select; the first tokens of one of
    these come last. Without, each token is a word.
    """
    samples, tokens = np.repeat(np.arange(len(rows)), lengths)[maskable], np.flatnonzero(maskable)
    words = tokens if starts is None else starts.cumsum()[tokens]
    begins = np.flatnonzero((np.diff(samples, prepend=-1) != 0) | (np.diff(words, prepend=-1) != 0))
    sample, size = samples[begins], np.diff(begins, append=len(tokens))  # of each word
    count = count_masked(np.bincount(samples, minlength=len(rows)), draw.probability)
    word_counts = np.bincount(sample, minlength=len(rows))
    priorities, replacements = _uniform(draw, rows, word_counts, 2 * count)
    order = np.lexsort((priorities, sample))
    masked_per_word = np.empty_like(size)
    masked_per_word[order] = _take(size[order], sample[order], count, word_counts)
    within = np.arange(len(tokens)) - np.repeat(begins, size)
    is_masked = np.zeros(len(maskable), np.bool_)
    is_masked[tokens[within < np.repeat(masked_per_word, size)]] = True
    return is_masked, replacements.reshape(-1, 2)


def _uniform(draw: Draw, rows: np.ndarray, *counts: np.ndarray) -> list[np.ndarray]:
    """Uniform random numbers, all of one sample before the next: as many for each as in each of `counts` (samples,)."""
    key = np.array([draw.seed % 2**64, draw.epoch], np.uint64)
    philox = np.random.Philox(key=key)
    generator, state = np.random.Generator(philox), philox.state
    numbers: list[list[np.ndarray]] = [[] for _ in counts]
    for row, *each in zip(rows.tolist(), *(count.tolist() for count in counts), strict=True):
        state["state"]["counter"] = np.array([0, row, 0, 0], np.uint64)
        philox.state = state  # a third of the time of a new generator
        for parts, count in zip(numbers, each, strict=True):
            parts.append(generator.random(count))
    return [np.concatenate(parts) for parts in numbers]


def _take(
    size: np.ndarray, sample: np.ndarray, count: np.ndarray, word_counts: np.ndarray
) -> np.ndarray:
    """(words,) how many tokens to select of each word. `size`, `sample` (words,), in the order of selection within each
    sample; `count`, `word_counts` (samples,)."""
    start = np.repeat(
        word_counts.cumsum() - word_counts, word_counts
    )  # of a word: its sample's first word
    place, whole = np.arange(len(size)), np.ones(len(size), np.bool_)
    while True:
        before = np.append(0, (size * whole).cumsum())
        before = before[:-1] - before[start]  # selected of this sample before each word
        too_long = whole & (before + size > count[sample])
        first = np.unique(sample[too_long], return_index=True)[1]
        first = np.flatnonzero(too_long)[first]
        if not len(first):
            break
        # no later word of the sample that is longer than what remains fits, either
        since, remaining = np.full(len(count), len(size)), np.zeros(len(count), np.int64)
        since[sample[first]], remaining[sample[first]] = first, count[sample[first]] - before[first]
        whole &= (place < since[sample]) | (size <= remaining[sample])
    masked_per_word = size * whole
    missing = count - np.bincount(sample, masked_per_word, len(count)).astype(np.int64)
    skipped = np.flatnonzero(~whole)
    of, first = np.unique(sample[skipped], return_index=True)
    masked_per_word[skipped[first]] = missing[of]
    return masked_per_word


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

    def __init__(
        self, split: Any, tokenizer: Any, device: torch.device, seed: int, probabilities: Any
    ) -> None:
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
        indices = indices if len(indices) else np.zeros(1, np.int64)
        lengths, width = self.split.lengths[indices], batch.inputs["input_ids"].shape[1]
        ids, is_masked, truth = self.mask_tokens(indices)
        shift = (width - lengths) * self.left
        begins = lengths.cumsum() - lengths - shift
        positions = np.flatnonzero(is_masked) - np.repeat(begins, lengths)[is_masked]
        counts = np.bincount(
            np.repeat(np.arange(len(indices)), lengths)[is_masked], minlength=len(indices)
        )
        most = max(1, int(counts.max()))
        labels = self.padded(truth, counts, most, IGNORED, left=False)  # (B, K)
        inputs = {
            "input_ids": self.padded(ids, lengths, width, self.pad_id, self.left),
            "target_positions": self.padded(positions, counts, most, 0, left=False),
            "target_ids": labels,
        }
        return replace(batch, inputs=batch.inputs | inputs, labels=labels)

    def mask_tokens(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of these samples, one after another: ((T,) ids after masking, (T,) bool, the tokens to predict, (n,) their
        original ids): 80 % become the mask token, 10 % a random token, and 10 % stay (Devlin et al. 2019, BERT, section
        3.1)."""
        split, words = self.split, self.split.words
        ids = split.gather(split.input_ids, indices)
        starts = None if words is None else split.gather(words, indices)
        is_masked, random = draw_masks(
            self.draw, split.rows[indices], split.lengths[indices], ~self.special[ids], starts
        )
        truth, others = (
            ids[is_masked],
            self.ordinary[(random[:, 1] * len(self.ordinary)).astype(np.int64)],
        )
        ids[is_masked] = np.select(
            [random[:, 0] < 0.8, random[:, 0] < 0.9], [self.mask_id, others], truth
        )
        return ids, is_masked, truth


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
        default = "0.30" if load_config(settings.model).model_type in _MASKED_30_PERCENT else "0.15"
        first, _, last = (settings.masking.mlm_probability or default).partition(":")
        return partial(
            MaskingCollator,
            seed=settings.training.seed,
            probabilities=(float(first), float(last or first)),
        )

    @classmethod
    def next_command(cls, settings: Any, folder: Path) -> str | None:
        kind = load_config(settings.model).model_type
        recipe = "bigbird" if kind == "big_bird" else "cls"
        model = shlex.quote(str(folder / "model"))
        return f"python recipes/{recipe}.py --model_name_or_path {model} --train_file YOUR_FILE.csv"

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        name = f"model {settings.model.model_name_or_path}"
        if smoothing := settings.training.label_smoothing_factor:
            raise UserError(
                f"--label_smoothing_factor {smoothing} has no effect in pretraining: leave it out"
            )
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"{name}: its tokenizer has no mask token: take a masked-language model"
            )
        if settings.masking.whole_word_mask and not tokenizer.is_fast:
            raise UserError(
                f"{name}: --whole_word_mask needs a fast tokenizer, and {type(tokenizer).__name__} is slow"
            )

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        return {"words": load_jieba().name if settings.masking.whole_word_mask else None}

    @classmethod
    def find(
        cls, settings: Any, table: Table, text_column: str, rows: np.ndarray | None = None
    ) -> Masks:
        return cls(settings.masking.whole_word_mask)

    def trial(self, split: Any) -> tuple[Any, Any]:
        return np.ones((1, 2)), np.ones(1)

    def save(self, folder: Path, rows: Rows, tokenizer: Any) -> list[str]:
        """Writes `labels`, and, for whole words, `words`. Raises UserError if no token is maskable."""
        ids, offsets = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("input_ids", "offsets")
        )
        ordinary = ~special_tokens(tokenizer)
        maskable = [
            np.count_nonzero(ordinary[ids[start:end]])
            for start, end in itertools.pairwise(offsets.tolist())
        ]
        np.save(folder / "labels.npy", np.array(maskable, np.int64))
        if not any(maskable):
            why = "consist of special and unknown tokens only: is it the right --text_column, and their language that"
            raise UserError(
                f"{rows.table.name}: the texts of {folder.name} {why} of the model's tokenizer?"
            )
        if self.whole_word_mask:
            saved = _save_words(folder, rows, copy.deepcopy(tokenizer), int(np.diff(offsets).max()))
            if saved != len(ids):
                name = type(tokenizer).__name__
                raise UserError(
                    f"--whole_word_mask: the character offsets of {name} are wrong: leave it out"
                )
        return []

    def facts(self) -> dict[str, Any]:
        return {
            "labels": [],
            "problem_type": "masked_language_modeling",
            "whole_word_mask": self.whole_word_mask,
        }

    def describe(self) -> str:
        return f"masked {'whole words' if self.whole_word_mask else 'tokens'}"


def _save_words(folder: Path, rows: Rows, tokenizer: Any, max_length: int) -> int:
    """Writes `words`, and returns its number of tokens."""
    bar, done, tokens = Progress(f"words of {folder.name}", len(rows), "texts"), 0, 0
    tokenizer(
        ["a"], truncation=True, max_length=max_length
    )  # sets the truncation, for `cut_long_texts`
    with append_to_npy(folder / "words.npy", np.bool_) as append:
        for whole, _ in rows.texts():
            texts = list(cut_long_texts(tokenizer, whole, max_length))
            encoded = tokenizer(
                texts, truncation=True, max_length=max_length, return_offsets_mapping=True
            )
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
    return {
        "perplexity": math.exp(min(loss, 700)),
        "masked_accuracy": right,
        "masked_tokens": int(counts.sum()),
    }


def masked_evaluation(outputs: Outputs, compute_metrics: ComputeMetrics) -> Evaluation:
    """The evaluation from gathered sums (N, 2); all ranks get the metrics."""
    if not (arrays := outputs.in_order()):
        return outputs.make_evaluation()
    (sums,), counts = arrays, outputs.split.loss_denominators()
    lines = partial(_lines, outputs.split, sums, counts.tolist())
    return outputs.make_evaluation(sums[:, 0], compute_metrics(sums, counts), lines)


def _lines(split: Split, sums: np.ndarray, counts: list[int]) -> Iterator[dict[str, Any]]:
    for row, count, (loss, right) in zip(split.rows, counts, sums.tolist(), strict=True):
        loss, right = round(loss / max(1, count), 6), round(right / max(1, count), 6)
        scores = {"scores": {"masked_accuracy": right}, "weight": count}
        yield {"id": int(row), "masked_tokens": count, "loss": loss, **scores}
