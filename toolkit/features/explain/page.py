"""Attributions of words by integrated gradients over the word embeddings, computed by captum.

Sundararajan, Taly and Yan 2017, "Axiomatic Attribution for Deep Networks". The baseline is the text with padding
between its special tokens: the attributions add up to the difference between the outputs for the text and for it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.config import ModelSettings
from toolkit.data.jieba_tokenizer import is_jieba
from toolkit.data.labels import Labels
from toolkit.data.tokens import load_tokenizer
from toolkit.models.classifier import load_saved_classifier
from toolkit.utils.extras import require_extra
from toolkit.utils.log import logger

SECONDS = 60.0
"""Time limit for all rows, without loading the model."""
_POINTS, _MAX_TOKENS = 32, 4096
"""Points of the integral (Gauss-Legendre); tokens in a batch of points."""
_MAX_CHARACTERS, _STRONGEST = 1500, 5
_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uffef\U00020000-\U0003ffff]")
_Output = Callable[[torch.Tensor], torch.Tensor]


class Word(NamedTuple):
    """A word of a text, or the characters between two words."""

    text: str
    adds: float | None
    """The attribution; None for the characters between words."""
    strength: float = 0.0
    """The attribution's size relative to the strongest word's, 0 to 1."""


class Explanation(NamedTuple):
    """The attributions of one row."""

    towards: str
    against: str
    """The outcomes that positive and negative attributions favour."""
    words: list[Word]
    strongest: list[Word]
    punctuation: float
    """The sum over pieces without a letter or digit, which are not coloured."""
    difference: float
    """The sum over all words: the output for this text minus that for the baseline."""


def explain(
    folder: Path, data: dict[str, Any], samples: Sequence[Any], texts: Sequence[str], most: int
) -> dict[int, Explanation]:
    """Explains the first `most` samples, as far as the time limit allows, by the run's saved model in this process ->
    place of a sample -> explanation. Raises UserError where captum is missing."""
    require_extra("--explain", "explain", "captum")
    settings = ModelSettings(model_name_or_path=str(folder / "model"))
    tokenizer, model = load_tokenizer(settings), load_saved_classifier(settings).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
    labels = Labels(data["problem_type"], tuple(data["labels"]), ())
    deadline, explanations = time.monotonic() + SECONDS, dict[int, Explanation]()
    for sample in samples[:most]:
        pair = texts[sample.place].split("\n", 1) if data.get("text_pair") else [texts[sample.place]]
        towards, against, output_of = _choose_output(labels, sample)
        try:
            words = _attribute_words(model, tokenizer, pair, data["max_length"], output_of, deadline)
        except TimeoutError:
            logger.info(f"{len(explanations)} rows are explained: more would take longer than {SECONDS:.0f} s")
            break
        explanations[sample.place] = summarize(words, towards, against)
    return explanations


def _choose_output(labels: Labels, sample: Any) -> tuple[str, str, _Output]:
    """(`towards`, `against`, (B, C) logits -> the explained output (B,))."""
    if labels.problem_type == "single_label_classification":
        guess, truth = labels.names.index(sample.prediction), labels.names.index(sample.label)
        return sample.prediction, sample.label, lambda logits: logits[:, guess] - logits[:, truth]
    if labels.problem_type == "multi_label_classification":  # the wrong label with the highest confidence
        errors = dict(sample.added) | {name: 1 - chance for name, chance in sample.missed}
        name = max(errors, key=errors.__getitem__)
        return name, f"not {name}", lambda logits: logits[:, labels.names.index(name)]
    place = int(np.abs(np.subtract(sample.prediction, sample.label)).argmax())
    return f"a greater {labels.names[place]}", "a smaller one", lambda logits: logits[:, place]


def _attribute_words(
    model: Any, tokenizer: Any, texts: list[str], max_length: int, output_of: _Output, deadline: float
) -> list[Word]:
    """The words of one row's text or pair of texts; the tokens, if the tokenizer has no offsets."""
    has_offsets = tokenizer.is_fast and not is_jieba(tokenizer)
    encoded = tokenizer(
        *texts, truncation="longest_first", max_length=max_length, return_tensors="pt", return_special_tokens_mask=True,
        return_offsets_mapping=has_offsets,
    )  # fmt: skip
    special = encoded["special_tokens_mask"][0].bool()
    inputs = {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask", "token_type_ids")
              if name in encoded}  # fmt: skip
    adds = attribute(model, inputs, special.to(model.device), output_of, deadline).tolist()
    if not has_offsets:
        tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
        words = [Word(token, value) for token, value, skip in zip(tokens, adds, special, strict=True) if not skip]
        return [*words, Word(" ", None)]
    offsets, word_ids, words = encoded["offset_mapping"][0].tolist(), encoded.word_ids(0), list[Word]()
    for number, text in enumerate(texts):
        places = [token for token, sequence in enumerate(encoded.sequence_ids(0)) if sequence == number]
        words += join_tokens(text, [(*offsets[token], word_ids[token], adds[token]) for token in places])
    return words


def attribute(
    model: Any, inputs: dict[str, torch.Tensor], special: torch.Tensor, output_of: _Output, deadline: float
) -> np.ndarray:
    """Attributions of tokens: `inputs` (1, S) of one text, `special` (S,) bool -> (S,) float32.

    Raises TimeoutError at the deadline (`time.monotonic`).
    """
    from captum.attr import LayerIntegratedGradients

    ids, (names, others) = inputs["input_ids"], zip(*list(inputs.items())[1:], strict=True)

    def output(ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if time.monotonic() > deadline:
            raise TimeoutError
        return output_of(model(input_ids=ids, **dict(zip(names, others, strict=True))).logits.float())

    adds = LayerIntegratedGradients(output, model.get_input_embeddings()).attribute(
        ids,
        torch.where(special, ids, model.config.get_text_config().pad_token_id or 0),
        additional_forward_args=others,
        n_steps=_POINTS,
        method="gausslegendre",
        internal_batch_size=max(1, _MAX_TOKENS // ids.shape[1]),
    )  # (1, S, H); a BigBird pads S to a multiple of its block
    return adds.sum(dim=-1)[0, : ids.shape[1]].float().cpu().numpy()


def join_tokens(text: str, tokens: Sequence[tuple[int, int, int | None, float]]) -> list[Word]:
    """(start, end, word, attribution) of a text's tokens -> its words, and the characters between them.

    Pieces of a word are joined, except Chinese characters: some tokenizers take a sentence for one word.
    """
    words: list[Word] = []
    done, last = 0, None
    for start, end, word, adds in tokens:
        start, end = max(start, done), max(end, done)
        piece, before = text[start:end], words[-1] if words else Word("", 0)
        joins = word is not None and word == last and start == done
        if joins and not (piece and _CJK.search(before.text[-1:] + piece[:1])):  # no piece: a byte of a character
            words[-1] = Word(before.text + piece, (before.adds or 0) + adds)
        else:
            blank = start + len(piece) - len(piece.lstrip())  # some tokenizers include leading spaces
            words += [*[Word(text[done:blank], None)] * (blank > done), Word(text[blank:end], adds)]
        done, last = end, word
    return [*words, Word(" ", None)]


def summarize(words: Sequence[Word], towards: str, against: str) -> Explanation:
    """Strengths of the words with a letter or digit, the strongest of them, and the beginning of a long text."""
    adds, readable = np.array([(word.adds or 0, any(map(str.isalnum, word.text))) for word in words]).T
    sizes = np.abs(adds) * readable
    strengths = (sizes / (sizes.max() or 1)).tolist()
    words = [word._replace(strength=strength) for word, strength in zip(words, strengths, strict=True)]
    strongest = [words[place] for place in np.argsort(-sizes, kind="stable")[:_STRONGEST] if sizes[place]]
    ends = np.cumsum([len(word.text) for word in words])
    beginning = words[: int(np.searchsorted(ends, _MAX_CHARACTERS)) + 1]
    beginning += [Word("…", None)] * (len(beginning) < len(words))
    punctuation = float(adds[readable == 0].sum())
    return Explanation(towards, against, beginning, strongest, punctuation, float(adds.sum()))
