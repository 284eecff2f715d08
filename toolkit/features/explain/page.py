"""Which words led to the worst mistakes: `toolkit report RUN --explain 5`."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.tokens import load_tokenizer
from toolkit.errors import UserError
from toolkit.features.explain.attribution import attribute
from toolkit.models.classifier import load_saved_classifier
from toolkit.utils.log import logger

SECONDS = 60.0
"""For all rows together, loading the model not counted."""
_MOST_CHARACTERS = 1500
_STRONGEST = 5
_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uffef\U00020000-\U0003ffff]")


class Word(NamedTuple):
    """A piece of a text."""

    text: str
    adds: float | None
    """To the output that is explained; None for what lies between words."""
    strength: float = 0.0
    """Its size against the strongest word's, 0 to 1."""


class Explanation(NamedTuple):
    """Of one row."""

    towards: str
    against: str
    """What positive and negative words speak for."""
    words: list[Word]
    strongest: list[Word]
    punctuation: float
    """What the pieces without a letter or digit add: they are not coloured, and are no reason that one can read."""
    difference: float
    """The sum of all words: the output for this text less that for the baseline."""


def explain(
    folder: Path, data: dict[str, Any], samples: Sequence[Any], texts: Sequence[str], most: int
) -> dict[int, Explanation]:
    """Place of a sample -> its explanation, by the run's saved model on this machine alone, for the first `most` of
    these samples that the time allows. Raises UserError where captum is missing."""
    if importlib.util.find_spec("captum") is None:
        raise UserError("--explain needs a package that is not installed: pip install 'finetune-toolkit[explain]'")
    settings = ModelSettings(model_name_or_path=str(folder / "model"))
    tokenizer, model = load_tokenizer(settings), load_saved_classifier(settings).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
    labels = Labels(data["problem_type"], tuple(data["labels"]), ())
    started, explanations = time.monotonic(), {}
    for sample in samples[:most]:
        pair = texts[sample.place].split("\n", 1) if data.get("text_pair") else [texts[sample.place]]
        towards, against, place, other = _output(labels, sample)
        words = _words_of(
            model, tokenizer, pair, data["max_length"], place, other, SECONDS - (time.monotonic() - started)
        )
        if words is not None:
            explanations[sample.place] = summarize(words, towards, against)
    if len(explanations) < min(most, len(samples)):
        logger.info(f"{len(explanations)} rows are explained: more would take longer than {SECONDS:.0f} s")
    return explanations


def _output(labels: Labels, sample: Any) -> tuple[str, str, int, int | None]:
    """(what the explained output speaks for, and against, its logit, the logit that is subtracted from it)."""
    if labels.problem_type == "single_label_classification":
        places = labels.names.index(sample.prediction), labels.names.index(sample.label)
        return sample.prediction, sample.label, *places
    if labels.problem_type == "multi_label_classification":  # the label that is wrong most surely
        errors = dict(sample.added) | {name: 1 - chance for name, chance in sample.missed}
        name = max(errors, key=errors.__getitem__)
        return name, f"not {name}", labels.names.index(name), None
    place = int(np.abs(np.subtract(sample.prediction, sample.label)).argmax())
    return f"a greater {labels.names[place]}", "a smaller one", place, None


def _words_of(
    model: Any, tokenizer: Any, texts: list[str], max_length: int, place: int, other: int | None, seconds: float
) -> list[Word] | None:
    """The words of one row's text or pair of texts; None where there is no time for it."""
    encoded = tokenizer(
        *texts, truncation="longest_first", max_length=max_length, return_tensors="pt", return_special_tokens_mask=True,
        return_offsets_mapping=tokenizer.is_fast,
    )  # fmt: skip
    special = encoded["special_tokens_mask"][0].bool()
    inputs = {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask", "token_type_ids")
              if name in encoded}  # fmt: skip

    def output_of(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, place] - (0 if other is None else logits[:, other])

    attributions = attribute(model, inputs, special.to(model.device), output_of, seconds)
    if attributions is None:
        return None
    adds = attributions.tolist()
    if not tokenizer.is_fast:  # it has no offsets
        names = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
        return [Word(name, value) for name, value, skip in zip(names, adds, special, strict=True) if not skip]
    offsets, word_ids = encoded["offset_mapping"][0].tolist(), encoded.word_ids(0)
    words = []
    for number, text in enumerate(texts):
        places = [token for token, sequence in enumerate(encoded.sequence_ids(0)) if sequence == number]
        words += join_tokens(text, [(*offsets[token], word_ids[token], adds[token]) for token in places])
    return words


def join_tokens(text: str, tokens: Sequence[tuple[int, int, int | None, float]]) -> list[Word]:
    """(start, end, word, what it adds) of a text's tokens -> its words, and what lies between them.

    The pieces of a word are joined; Chinese characters stay apart, where a tokenizer takes a sentence for a word.
    """
    words: list[Word] = []
    done, last, carried = 0, None, 0.0
    for start, end, word, adds in tokens:
        start, end = max(start, done), max(end, done)
        piece, before = text[start:end], words[-1] if words else Word("", None)
        joins = word is not None and word == last and start == done and before.adds is not None
        if joins and not (piece and _CJK.search(before.text[-1:] + piece[:1])):  # no piece: a byte of a character
            words[-1] = Word(before.text + piece, before.adds + adds)  # type: ignore[operator]
        else:
            blank = start + len(piece) - len(piece.lstrip())  # some tokenizers count it to a word
            words += [Word(text[done:blank], None)] * (blank > done)
            carried += adds
            if blank < end or not piece:
                words.append(Word(text[blank:end], carried))
                carried = 0.0
        done, last = end, word
    return [*words, Word(" ", None)]


def summarize(words: Sequence[Word], towards: str, against: str) -> Explanation:
    """The strengths of words with a letter or digit, the strongest of them, and the beginning of a long text."""
    readable = [word.adds is not None and any(map(str.isalnum, word.text)) for word in words]
    sizes = [abs(word.adds or 0) * letters for word, letters in zip(words, readable, strict=True)]
    greatest = max(sizes, default=0) or 1.0
    words = [word._replace(strength=size / greatest) for word, size in zip(words, sizes, strict=True)]
    difference = sum(word.adds or 0 for word in words)
    punctuation = sum(word.adds or 0 for word, letters in zip(words, readable, strict=True) if not letters)
    strongest = sorted((word for word in words if word.strength), key=lambda word: -word.strength)[:_STRONGEST]
    ends = np.cumsum([len(word.text) for word in words])
    beginning = words[: int(np.searchsorted(ends, _MOST_CHARACTERS)) + 1]
    if len(beginning) < len(words):
        beginning.append(Word("…", None))
    return Explanation(towards, against, beginning, strongest, punctuation, difference)
