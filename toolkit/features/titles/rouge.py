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
from typing import Literal

from toolkit.errors import UserError
from toolkit.features.titles.readable import HAN, KANA
from toolkit.features.titles.settings import Segmenter
from toolkit.utils.extras import require_extra

KINDS = ("rouge1", "rouge2", "rougeL")
FOREIGN_SHARE = 0.2
"""If the share of Chinese among the references' letters is greater, `auto` takes jieba; if only
that of all letters but a-z is, char (whole words of Korean or Russian)."""

_HAN = re.compile(f"[{HAN}]")
_CHARACTERS = re.compile(rf"[{HAN}{KANA}]|[^\W_{HAN}{KANA}]+(?:(?<=\d)\.\d+)*")


def resolve(segmenter: Segmenter, references: Sequence[str]) -> Literal["word", "jieba", "char"]:
    """Replaces `auto`. Raises UserError for `word` if it would ignore the references' letters:
    every score would be 0."""
    if segmenter in ("jieba", "char"):
        return segmenter
    letters = "".join(filter(str.isalpha, "".join(references)))
    foreign = sum(not letter.isascii() for letter in letters)
    if foreign <= FOREIGN_SHARE * len(letters):
        return "word"
    if segmenter == "word":
        why = f"and {100 * foreign / len(letters):.0f} % of the references' letters are others"
        raise UserError(
            f"--rouge_segmenter word ignores all letters but a-z, {why}: choose jieba, char or auto"
        )
    return "jieba" if len(_HAN.findall(letters)) > FOREIGN_SHARE * len(letters) else "char"


def scores(
    predictions: Sequence[str], references: Sequence[str], segmenter: Segmenter
) -> list[dict[str, float]]:
    """{rouge1, rouge2, rougeL} of each pair: F-measures from 0 to 1; 0 for an empty text.

    Raises UserError if the extra `titles` is not installed, ValueError for lists of different
    lengths.
    """
    require_extra("ROUGE", "titles", "rouge_score")
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, a second

    tokenizer = SimpleNamespace(tokenize=tokenize_of(resolve(segmenter, references)))
    scorer = RougeScorer(KINDS, tokenizer=tokenizer)
    pairs = zip(predictions, references, strict=True)
    results = (scorer.score(reference, prediction) for prediction, reference in pairs)
    return [{kind: float(result[kind].fmeasure) for kind in KINDS} for result in results]


def tokenize_of(segmenter: Literal["word", "jieba", "char"]) -> Callable[[str], list[str]]:
    """A function from a text to its words."""
    if segmenter == "word":
        from rouge_score.tokenizers import DefaultTokenizer

        return DefaultTokenizer(use_stemmer=False).tokenize
    if segmenter == "char":
        return lambda text: _CHARACTERS.findall(_normalise(text))
    from toolkit.data.jieba_tokenizer import load_jieba

    cutter = load_jieba().cutter
    return lambda text: [
        word for word in cutter.lcut(_normalise(text)) if any(map(str.isalnum, word))
    ]


def _normalise(text: str) -> str:
    """Full-width letters and digits as ASCII, in lower case: jieba cuts `2018 t恤` and `２０１８ T恤`
    differently."""
    return unicodedata.normalize("NFKC", text).lower()
