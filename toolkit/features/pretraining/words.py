"""Word boundaries among the tokens of a text: Chinese, languages with spaces, and mixtures."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from toolkit.data.jieba_tokenizer import load_jieba

_CHINESE = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KATAKANA = "\u30a1-\u30fa\u30fc"
# accents, vowels and joiners, but not the space of no width between words
_MARKS = "".join(
    mark
    for mark in map(chr, range(0x10000))
    if unicodedata.category(mark) in ("Mn", "Mc", "Me", "Cf")
)
_MARKS = _MARKS.replace("\u200b", "")
_LETTER = rf"[^\W_{_CHINESE}{_KATAKANA}\u3041-\u3096]"
# letters and digits, including don't, 3.5 and 10,000; a run of katakana; any other single character
_WORD = re.compile(
    rf"{_LETTER}(?:{_LETTER}|[{_MARKS}]|['’](?={_LETTER})|(?<=\d)[.,](?=\d))*|[{_KATAKANA}]+|\S"
)
HAN = re.compile(f"[{_CHINESE}]")


def words_of(text: str) -> Iterator[tuple[int, int]]:
    """(start, end), in characters, of each word and punctuation mark. Raises UserError for Chinese
    without jieba."""
    pieces = [text]
    if HAN.search(text):
        pieces = load_jieba().cutter.cut(text, HMM=False)
    start = 0  # of a part that is not Chinese, whose words jieba would cut at letters like é
    end = 0
    for piece in pieces:
        end += len(piece)
        if HAN.search(piece):
            yield from (match.span() for match in _WORD.finditer(text, start, end - len(piece)))
            yield end - len(piece), end
            start = end
    yield from (match.span() for match in _WORD.finditer(text, start))


def word_starts(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """(tokens,) bool: whether each token, with the character range in `offsets`, begins a word.
    Words that share a token count as one, and a token of spaces as a word."""
    word_at = [-1] * len(text)  # of each character; -1: none
    for word, (start, end) in enumerate(words_of(text)):
        word_at[start:end] = [word] * (end - start)
    starts = []
    previous = -1
    for begin, end in offsets:
        words = [word for word in word_at[begin:end] if word >= 0] or [-1]
        starts.append(words[0] < 0 or words[0] != previous)
        previous = words[-1]
    return np.array(starts, np.bool_)
