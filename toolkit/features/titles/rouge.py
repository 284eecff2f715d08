"""ROUGE of Chinese and English texts by Google's `rouge-score`.

ROUGE counts words, and Chinese has no spaces between them: scores of different segmenters cannot be
compared. F-measures (beta 1) after Lin, "ROUGE: A Package for Automatic Evaluation of Summaries"
(2004); ROUGE-L takes the whole text as one sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from toolkit.data.jieba_tokenizer import load_jieba
from toolkit.features.titles.readable import HAN, KANA

KINDS = ("rouge1", "rouge2", "rougeL")
_FOREIGN_SHARE = 0.2
_HAN = re.compile(f"[{HAN}]")
_CHARACTERS = re.compile(rf"[{HAN}{KANA}]|[^\W_{HAN}{KANA}]+(?:(?<=\d)\.\d+)*")


def resolve(segmenter: str, references: Sequence[str]) -> str:
    """Replaces `auto`: by `jieba` if more than a fifth of the references' letters are Chinese, by
    `char` if as many are no a-z (whole words of Korean or Russian), else by `word`."""
    if segmenter != "auto":
        return segmenter
    letters = "".join(filter(str.isalpha, "".join(references)))
    many = _FOREIGN_SHARE * len(letters)
    if len(_HAN.findall(letters)) > many:
        return "jieba"
    if sum(not letter.isascii() for letter in letters) > many:
        return "char"
    return "word"


def scores(
    predictions: Sequence[str],
    references: Sequence[str],
    segmenter: str,
) -> list[dict[str, float]]:
    """{rouge1, rouge2, rougeL} of each pair: F-measures from 0 to 1; 0 for an empty text. Raises
    ValueError for lists of different lengths."""
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, a second

    tokenize = tokenize_of(resolve(segmenter, references))
    scorer = RougeScorer(KINDS, tokenizer=SimpleNamespace(tokenize=tokenize))
    scored = []
    for prediction, reference in zip(predictions, references, strict=True):
        result = scorer.score(reference, prediction)
        scored.append({kind: float(result[kind].fmeasure) for kind in KINDS})
    return scored


def tokenize_of(segmenter: str) -> Callable[[str], list[str]]:
    """A function from a text to its words. `word`: runs of a-z and 0-9 without stemming, as in
    published English results; `char`: Chinese characters, all other words and numbers."""
    if segmenter == "word":
        from rouge_score.tokenizers import DefaultTokenizer

        return DefaultTokenizer(use_stemmer=False).tokenize
    if segmenter == "char":
        return lambda text: _CHARACTERS.findall(_normalise(text))
    cut = load_jieba().cutter.lcut
    return lambda text: [
        word for word in cut(_normalise(text)) if any(map(str.isalnum, word))
    ]


def _normalise(text: str) -> str:
    """Full-width letters and digits as ASCII, in lower case: jieba cuts `2018 t恤` and `２０１８ T恤`
    differently."""
    return unicodedata.normalize("NFKC", text).lower()
