"""Where words begin among the tokens of a text, in Chinese, in languages with spaces, and where both are mixed.

transformers' `whole_word_mask` (5.23) takes a gap between two tokens for the beginning of a word: a Chinese clause,
which has none, would be one word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from toolkit.data.jieba_tokenizer import load_jieba

HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KATAKANA = "\u30a1-\u30fa\u30fc"
_HIRAGANA = "\u3041-\u3096"
_MARKS = "".join(mark for mark in map(chr, range(0x10000)) if unicodedata.category(mark)[0] == "M")  # accents, vowels
_LETTER = rf"[^\W_{HAN}{_HIRAGANA}{_KATAKANA}]"
# letters and digits, with what stands inside (don't, 3.5, 10,000); katakana; each other character by itself
_WORD = re.compile(rf"{_LETTER}(?:{_LETTER}|[{_MARKS}]|['’](?={_LETTER})|(?<=\d)[.,](?=\d))*|[{_KATAKANA}]+|\S")
_HAN = re.compile(f"[{HAN}]")


def words_of(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each word and mark, in characters: all that is no space, in order. Raises UserError where there
    is Chinese and jieba is missing."""
    for start, end, is_word in _pieces(text):
        if is_word:
            yield start, end
        else:
            yield from (match.span() for match in _WORD.finditer(text, start, end))


def _pieces(text: str) -> Iterator[tuple[int, int, bool]]:
    """What jieba cuts, (start, end, True) where it is Chinese; all between two Chinese words is one piece, as jieba
    cuts a Latin word for a letter that it does not know."""
    start = end = 0
    for piece in load_jieba().cutter.cut(text, HMM=False) if _HAN.search(text) else (text,):
        if _HAN.search(piece):
            yield start, end, False
            yield end, end + len(piece), True
            start = end + len(piece)
        end += len(piece)
    yield start, end, False


def word_starts(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """(tokens,) bool: whether each token, of the characters `offsets`, begins a word. One that is in two words makes
    them one, and spaces alone are a word."""
    spans, count = np.array([*words_of(text)], np.int64).reshape(-1, 2), len(text)
    word_at = np.full(count + 1, -1)  # of each character
    lengths = spans[:, 1] - spans[:, 0]
    places = np.repeat(spans[:, 0] - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    word_at[places] = np.repeat(np.arange(len(spans)), lengths)
    characters = np.arange(count + 1)
    following = np.minimum.accumulate(np.where(word_at >= 0, characters, count)[::-1])[::-1]
    preceding = np.maximum.accumulate(np.where(word_at >= 0, characters, -1))
    begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
    first = np.where(following[begin] < end, word_at[following[begin]], -1)
    last = np.where((begin < end) & (preceding[end - 1] >= begin), word_at[preceding[end - 1]], -1)
    return np.append(True, (first[1:] != last[:-1]) | (first[1:] < 0))


def starts_of(tokenizer: object, texts: Iterable[str], max_length: int) -> Iterator[np.ndarray]:
    """`word_starts` of each text as a fast tokenizer reads it, special tokens among them."""
    texts = list(texts)
    encoded = tokenizer(texts, truncation=True, max_length=max_length, return_offsets_mapping=True)  # type: ignore[operator]
    yield from map(word_starts, texts, encoded["offset_mapping"])
