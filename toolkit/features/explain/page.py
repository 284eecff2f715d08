"""Which words led to the worst mistakes: `toolkit report RUN --explain 5`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.tokens import load_tokenizer
from toolkit.features.explain.attribution import attribute
from toolkit.models.classifier import load_saved_classifier

SECONDS = 60.0
"""For all rows together, loading the model not counted."""
_MOST_CHARACTERS = 1500
_STRONGEST = 5
_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uffef\U00020000-\U0003ffff]")


_Piece = tuple[str, float | None]


class Word(NamedTuple):
    """A piece of a text, and what it adds to the output that is explained."""

    text: str
    adds: float | None
    """None for what lies between words."""
    strength: float
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
    """The sum of all words: how far this text moves the output from that of a text that says nothing."""


def explain(
    folder: Path, data: dict[str, Any], samples: Sequence[Any], texts: Sequence[str], most: int
) -> dict[int, Explanation]:
    """Place of a sample -> its explanation, by the run's saved model on this machine alone, for the first `most` of
    these samples that the time allows."""
    named = ModelSettings(model_name_or_path=str(folder / "model"))
    tokenizer, model = load_tokenizer(named), load_saved_classifier(named).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
    labels = Labels(data["problem_type"], tuple(data["labels"]), ())
    begun, found = time.monotonic(), {}
    for sample in samples[:most]:
        pair = texts[sample.place].split("\n", 1) if data.get("text_pair") else [texts[sample.place]]
        left = SECONDS - (time.monotonic() - begun)
        one = _explained(model, tokenizer, labels, sample, pair, data["max_length"], left)
        if one is not None:
            found[sample.place] = one
    if len(found) < min(most, len(samples)):
        print(f"{len(found)} rows are explained: more would take longer than {SECONDS:.0f} s", file=sys.stderr)
    return found


def _explained(
    model: Any, tokenizer: Any, labels: Labels, sample: Any, texts: list[str], max_length: int, seconds: float
) -> Explanation | None:
    encoded = tokenizer(
        *texts, truncation="longest_first", max_length=max_length, return_tensors="pt", return_special_tokens_mask=True,
        return_offsets_mapping=tokenizer.is_fast,
    )  # fmt: skip
    special = encoded.pop("special_tokens_mask")[0].bool().to(model.device)
    offsets = encoded.pop("offset_mapping")[0].tolist() if tokenizer.is_fast else None
    inputs = {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask", "token_type_ids")
              if name in encoded}  # fmt: skip
    towards, against, place, other = _output(labels, sample)
    found = attribute(
        model, inputs, special, lambda logits: logits[:, place] - (0 if other is None else logits[:, other]), seconds
    )
    if found is None:
        return None
    adds, pieces = found.tokens.tolist(), list[_Piece]()
    if offsets is None:  # a tokenizer written in Python does not say where its tokens stand
        names = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
        pieces += [(name, adds[place]) for place, name in enumerate(names) if not special[place]]
    else:
        of, words = encoded.sequence_ids(0), encoded.word_ids(0)
        for number, text in enumerate(texts):
            own = [place for place, each in enumerate(of) if each == number]
            pieces += _words(text, [(*offsets[place], words[place], adds[place]) for place in own])
    return _shown(pieces, towards, against, float(found.tokens.sum()))


def _output(labels: Labels, sample: Any) -> tuple[str, str, int, int | None]:
    """(what it speaks for, and against, the logit, the one that is taken from it)."""
    if labels.problem_type == "single_label_classification":
        places = labels.names.index(sample.prediction), labels.names.index(sample.label)
        return sample.prediction, sample.label, *places
    if labels.problem_type == "multi_label_classification":
        name = max([*sample.added, *((name, 1 - chance) for name, chance in sample.missed)], key=lambda each: each[1])[
            0
        ]
        return name, f"not {name}", labels.names.index(name), None
    off = np.abs(np.subtract(sample.prediction, sample.label)).reshape(-1)
    name = labels.names[place := int(off.argmax())]
    return f"a greater {name}", "a smaller one", place, None


def _words(text: str, tokens: Sequence[tuple[int, int, int | None, float]]) -> list[_Piece]:
    """(start, end, word, what it adds) of a text's tokens -> its words, and what lies between them (None).

    The pieces of a word are one; Chinese characters stay apart, where a tokenizer takes a sentence for a word.
    """
    pieces: list[_Piece] = []
    done, last, carried = 0, None, 0.0
    for start, end, word, adds in tokens:
        start, end = max(start, done), max(end, done)
        piece, before = text[start:end], pieces[-1] if pieces else ("", None)
        joins = word is not None and word == last and start == done and before[1] is not None
        if joins and not (piece and _CJK.search(before[0][-1:] + piece[:1])):  # no piece: a byte of a character
            pieces[-1] = (before[0] + piece, before[1] + adds)  # type: ignore[operator]
        else:
            blank = start + len(piece) - len(piece.lstrip())  # which some tokenizers count to the word behind it
            pieces += [(text[done:blank], None)] * (blank > done)
            carried += adds
            if blank < end or not piece:
                pieces.append((text[blank:end], carried))
                carried = 0.0
        done, last = end, word
    return [*pieces, (" ", None)]


def _shown(pieces: Sequence[_Piece], towards: str, against: str, difference: float) -> Explanation:
    read = [adds if any(map(str.isalnum, text)) else None for text, adds in pieces]
    greatest = max((abs(adds) for adds in read if adds is not None), default=0) or 1.0
    words = [Word(text, adds, abs(own or 0) / greatest) for (text, adds), own in zip(pieces, read, strict=True)]
    strongest = sorted((word for word in words if word.strength), key=lambda word: -word.strength)
    ends = np.cumsum([len(word.text) for word in words])
    kept = words[: int(np.searchsorted(ends, _MOST_CHARACTERS)) + 1]
    kept += [Word("…", None, 0)] * (len(kept) < len(words))
    punctuation = sum(adds or 0 for (_, adds), own in zip(pieces, read, strict=True) if own is None)
    return Explanation(towards, against, kept, strongest[:_STRONGEST], punctuation, difference)
