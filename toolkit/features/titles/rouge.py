"""ROUGE of generated texts, Chinese and English, counted by Google's `rouge-score`.

ROUGE is defined on words, and Chinese is written without spaces: the segmenter is a part of the number, and
numbers of different segmenters cannot be compared. F-measures (beta 1) after Lin, "ROUGE: A Package for Automatic
Evaluation of Summaries" (2004); ROUGE-L is of the whole text, as one sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Literal

from toolkit.errors import UserError
from toolkit.features.titles.readable import HAN, KANA
from toolkit.utils.extras import require_extra

Segmenter = Literal["auto", "word", "jieba", "char"]
"""word: runs of a-z and 0-9 in lower case, no stemming, as published English numbers are counted.
jieba: Chinese words, whole Latin words and numbers. char: each Chinese character, whole Latin words and numbers.
auto: jieba or word, by the references."""
KINDS = ("rouge1", "rouge2", "rougeL")
CHINESE_SHARE = 0.2
"""`auto` takes jieba where more than this part of the references' letters is Chinese."""

_HAN = re.compile(f"[{HAN}]")
_EASTERN = re.compile(f"[{HAN}{KANA}]")
_CHARACTERS = re.compile(rf"[{HAN}{KANA}]|[^\W_{HAN}{KANA}]+(?:(?<=\d)\.\d+)*")


def resolve(segmenter: Segmenter, references: Sequence[str]) -> Literal["word", "jieba", "char"]:
    """The segmenter that will be used, to be written beside the numbers.

    Raises UserError for `word` on Chinese references: it sees no word in them, and every number would be 0.
    """
    if segmenter in ("jieba", "char"):
        return segmenter
    letters = sum(sum(map(str.isalpha, text)) for text in references)
    chinese = sum(len(_HAN.findall(text)) for text in references)
    if chinese <= CHINESE_SHARE * letters:
        return "word"
    if segmenter == "word":
        raise UserError(
            f"ROUGE of words cannot see Chinese, and {100 * chinese / letters:.0f} % of the references' letters are "
            "Chinese: choose jieba, char or auto"
        )
    return "jieba"


def scores(predictions: Sequence[str], references: Sequence[str], segmenter: Segmenter) -> list[dict[str, float]]:
    """One {rouge1, rouge2, rougeL} a pair, F-measures from 0 to 1; the mean is the caller's.

    An empty text has 0, and so has ROUGE-2 where a text has a single token.
    Raises UserError where the extra `titles` is not installed, ValueError for unequal numbers.
    """
    require_extra("ROUGE", "titles", "rouge_score")
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, a second

    tokenizer = SimpleNamespace(tokenize=tokenize_of(resolve(segmenter, references)))
    scorer = RougeScorer(KINDS, tokenizer=tokenizer)
    pairs = zip(predictions, references, strict=True)
    results = (scorer.score(reference, prediction) for prediction, reference in pairs)
    return [{kind: float(result[kind].fmeasure) for kind in KINDS} for result in results]


def tokenize_of(segmenter: Literal["word", "jieba", "char"]) -> Callable[[str], list[str]]:
    """A function from a text to the words of it that are counted."""
    if segmenter == "word":
        from rouge_score.tokenizers import DefaultTokenizer

        return DefaultTokenizer(use_stemmer=False).tokenize
    if segmenter == "char":
        return lambda text: _CHARACTERS.findall(_uniform(text))
    from toolkit.data.jieba_tokenizer import load_jieba

    cutter = load_jieba().cutter
    return lambda text: _joined(cutter.lcut(_uniform(text)))


def _uniform(text: str) -> str:
    """Full-width letters and digits as usual ones, in lower case, before cutting: a model that writes `2018 t恤`
    means the reference's `２０１８ T恤`, and jieba cuts the two differently."""
    return unicodedata.normalize("NFKC", text).lower()


def _joined(pieces: list[str]) -> list[str]:
    """Without spaces and marks; words that jieba cuts for a letter it does not know (caf, é) are whole again."""
    words: list[str] = []
    open_word = False
    for piece in pieces:
        known = any(map(str.isalnum, piece))
        western = known and not _EASTERN.search(piece)
        if western and open_word:
            words[-1] += piece
        elif known:
            words.append(piece)
        open_word = western
    return words
