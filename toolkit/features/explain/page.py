"""Attributions of words by integrated gradients over the word embeddings, computed by captum.

Sundararajan, Taly and Yan 2017, "Axiomatic Attribution for Deep Networks". The baseline is the text with padding
between its special tokens: the attributions add up to the difference between the outputs for the text and for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.tokens import has_token_types, load_tokenizer
from toolkit.errors import UserError
from toolkit.models.classifier import load_saved_classifier
from toolkit.utils.extras import require_extra

_POINTS, _MAX_TOKENS = 32, 4096
"""Points of the integral (Gauss-Legendre); tokens in a batch of points."""
_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uffef\U00020000-\U0003ffff]")


class Word(NamedTuple):
    """A word of a text, or the characters between two words."""

    text: str
    attribution: float = 0.0


def explain(
    folder: Path, data: dict[str, Any], samples: Sequence[Any], texts: Sequence[str]
) -> dict[int, Any]:
    """Explains samples by the run's saved model in this process -> place of a sample -> variables of words.html: the
    words, and the outcomes that positive and negative attributions favour.

    Raises UserError if captum is missing, and for tokenizers without offsets.
    """
    require_extra("--explain", "explain", "captum")
    settings = ModelSettings(model_name_or_path=str(folder / "model"))
    tokenizer, model = load_tokenizer(settings), load_saved_classifier(settings).eval()
    if not tokenizer.is_fast:
        raise UserError(f"--explain needs a fast tokenizer, and {type(tokenizer).__name__} is none")
    model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
    labels = Labels(data["problem_type"], tuple(data["labels"]), ())
    explanations = {}
    for sample in samples:
        pair = (
            texts[sample.place].split("\n", 1) if data.get("text_pair") else [texts[sample.place]]
        )  # see `join_pair`
        encoded = tokenizer(
            *pair, truncation="longest_first", max_length=data["max_length"], return_tensors="pt",
            return_special_tokens_mask=True, return_offsets_mapping=True,
        ).to(model.device)  # fmt: skip
        if not has_token_types(model.config):  # the tokenizer's would be outside of the table
            encoded.pop("token_type_ids", None)
        towards, against, output_of = _choose_output(labels, sample)
        attributions = attribute(model, encoded, output_of).tolist()
        spans = encoded["offset_mapping"][0].tolist()
        tokens = list(
            zip(encoded.sequence_ids(0), spans, encoded.word_ids(0), attributions, strict=True)
        )
        words = []
        for number, text in enumerate(pair):
            words += join_tokens(
                text, [(*span, word, value) for part, span, word, value in tokens if part == number]
            )
        explanations[sample.place] = {
            "towards": towards, "against": against, "words": words,
            "scale": max(abs(word.attribution) for word in words) or 1.0,
            "difference": sum(word.attribution for word in words),
        }  # fmt: skip
    return explanations


def _choose_output(
    labels: Labels, sample: Any
) -> tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]:
    """(`towards`, `against`, (B, C) logits -> the explained output (B,))."""
    if labels.problem_type == "single_label_classification":
        guess, truth = labels.names.index(sample.prediction), labels.names.index(sample.label)
        return sample.prediction, sample.label, lambda logits: logits[:, guess] - logits[:, truth]
    if (
        labels.problem_type == "multi_label_classification"
    ):  # the wrong label with the highest confidence
        errors = dict(sample.added) | {name: 1 - chance for name, chance in sample.missed}
        name = max(errors, key=errors.__getitem__)
        return name, f"not {name}", lambda logits: logits[:, labels.names.index(name)]
    place = int(np.abs(np.subtract(sample.prediction, sample.label)).argmax())
    return f"a greater {labels.names[place]}", "a smaller one", lambda logits: logits[:, place]


def attribute(
    model: Any, encoded: Mapping[str, torch.Tensor], output_of: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Attributions (S,) of the tokens of one text, `encoded` (1, S) with its `special_tokens_mask`."""
    from captum.attr import LayerIntegratedGradients

    ids, special = encoded["input_ids"], encoded["special_tokens_mask"].bool()
    others = {
        name: encoded[name] for name in ("attention_mask", "token_type_ids") if name in encoded
    }

    def output(ids: torch.Tensor) -> torch.Tensor:
        inputs = {name: values.expand_as(ids) for name, values in others.items()}
        return output_of(model(input_ids=ids, **inputs).logits.float())

    gradients = LayerIntegratedGradients(output, model.get_input_embeddings())
    baseline = torch.where(special, ids, model.config.get_text_config().pad_token_id or 0)
    rows = max(1, _MAX_TOKENS // ids.shape[1])
    # (1, S, H); a BigBird pads S to a multiple of its block
    attributions = gradients.attribute(
        ids, baseline, n_steps=_POINTS, method="gausslegendre", internal_batch_size=rows
    )
    return attributions.sum(dim=-1)[0, : ids.shape[1]].float().cpu()


def join_tokens(text: str, tokens: Iterable[tuple[int, int, int | None, float]]) -> list[Word]:
    """(start, end, word, attribution) of a text's tokens -> its words, and the characters between them.

    Pieces of a word are joined, except Chinese characters: some tokenizers take a sentence for one word.
    """
    words, done, last = list[Word](), 0, None
    for start, end, number, attribution in tokens:
        piece = text[max(start, done) : end]
        word = None if _CJK.search(piece) else number
        if words and (
            not piece or (word is not None and word == last)
        ):  # no piece: another byte of a character
            words[-1] = Word(words[-1].text + text[done:end], words[-1].attribution + attribution)
        else:
            words += [Word(text[done:start]), Word(piece, attribution)]
        done, last = max(done, end), word if piece else last
    return [*words, Word(" ")]
