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
from toolkit.errors import UserError
from toolkit.features.titles.readable import HAN, KANA
from toolkit.features.titles.settings import Segmenter

KINDS = ("rouge1", "rouge2", "rougeL")
FOREIGN_SHARE = 0.2
"""If the share of Chinese among the references' letters is greater, `auto` takes jieba; if only
that of all letters but a-z is, char (whole words of Korean or Russian)."""

_HAN = re.compile(f"[{HAN}]")
_CHARACTERS = re.compile(rf"[{HAN}{KANA}]|[^\W_{HAN}{KANA}]+(?:(?<=\d)\.\d+)*")


def resolve(segmenter: Segmenter, references: Sequence[str]) -> Segmenter:
    """Replaces `auto`. Raises UserError for `word` if it would ignore the references' letters:
    every score would be 0."""
    letters = "".join(filter(str.isalpha, "".join(references)))
    many = FOREIGN_SHARE * len(letters)
    usual: Segmenter = "word"
    if len(_HAN.findall(letters)) > many:
        usual = "jieba"
    elif sum(not letter.isascii() for letter in letters) > many:
        usual = "char"
    if segmenter == "word" and usual != "word":
        why = f"more than {FOREIGN_SHARE:.0%} of the references' letters are others"
        remedy = "choose jieba, char or auto"
        raise UserError(f"--rouge_segmenter word ignores all letters but a-z, and {why}: {remedy}")
    return usual if segmenter == "auto" else segmenter


def scores(
    predictions: Sequence[str], references: Sequence[str], segmenter: Segmenter
) -> list[dict[str, float]]:
    """{rouge1, rouge2, rougeL} of each pair: F-measures from 0 to 1; 0 for an empty text.
    `segmenter`: not `auto` (`resolve`). Raises ValueError for lists of different lengths."""
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, a second

    scorer = RougeScorer(KINDS, tokenizer=SimpleNamespace(tokenize=tokenize_of(segmenter)))
    scored = []
    for prediction, reference in zip(predictions, references, strict=True):
        result = scorer.score(reference, prediction)
        scored.append({kind: float(result[kind].fmeasure) for kind in KINDS})
    return scored


def tokenize_of(segmenter: Segmenter) -> Callable[[str], list[str]]:
    """A function from a text to its words."""
    if segmenter == "word":
        from rouge_score.tokenizers import DefaultTokenizer

        return DefaultTokenizer(use_stemmer=False).tokenize
    if segmenter == "char":
        return lambda text: _CHARACTERS.findall(_normalise(text))
    cut = load_jieba().cutter.lcut
    return lambda text: [word for word in cut(_normalise(text)) if any(map(str.isalnum, word))]


def _normalise(text: str) -> str:
    """Full-width letters and digits as ASCII, in lower case: jieba cuts `2018 t恤` and `２０１８ T恤`
    differently."""
    return unicodedata.normalize("NFKC", text).lower()
