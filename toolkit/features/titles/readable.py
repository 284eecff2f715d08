"""Tokens -> text as people write it: WordPiece puts a space between all words, Chinese has none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA = "\u3040-\u30ff\u31f0-\u31ff"
# the marks of Chinese text; the quotes, the dash and the dots that it shares with English are not among them
_MARKS = "\u3001-\u3003\u3008-\u301f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"

# Each removes spaces that no writer put there, in this order.
_RULES = tuple(
    (re.compile(pattern), put)
    for pattern, put in (
        (rf"(?<=[{HAN}{KANA}{_MARKS}])\s+|\s+(?=[{HAN}{KANA}{_MARKS}])", ""),
        (r"\s+(?=[.,!?;:%)\]}”’…])", ""),  # word . -> word.
        (r"(?<=[(\[{“‘$£€])\s+", ""),  # ( word -> (word
        (r"(?<=\w)\s?'\s(?=(?:s|t|re|ve|m|ll|d)\b)", "'"),  # don ' t -> don't
        (r"""(?<!\S)(['"]) ([^'"]+) \1(?![^\s.,!?;:])""", r"\1\2\1"),  # ' word word ' -> 'word word'
        (r"(?<=s) '(?= \w)", "'"),  # critics ' award -> critics' award
        (r"([-—~>+=*.…]) (?=\1)", r"\1"),  # - - -> --
        (r"(?<=[^\W_]) - (?=[^\W_])", "-"),  # five - year -> five-year
        (r"\s?_\s?", "_"),
        (r"(?<=\d\.) (?=\d)", ""),  # 3. 5 -> 3.5
        (r"(?<=\d:) (?=\d\d\b)", ""),  # 10: 30 -> 10:30
        (r"(?<![\d,])(\d{1,3},) (?=\d{3}(?!\d))", r"\1"),  # 10, 000 -> 10,000, but not 2019, 200
        (r"(?<=\d,\d{3},) (?=\d{3}(?!\d))", ""),  # and its millions
        (r"\s+", " "),
    )
)


def readable(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, without special tokens ([UNK] is one), for any tokenizer.

    `华 为 发 布 mate 60 .` -> `华为发布mate 60.`: a space beside a Chinese character or mark is removed, and
    one between Latin words stays; around a mark, the usual spaces are put, which need not be the writer's (`a - b`
    comes back as `a-b`). Case is the tokenizer's. Only spaces are ever changed.
    """
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return without_token_spaces(re.sub(r"^##(?=\w)", "", text))  # a title that begins inside a word


def without_token_spaces(text: str) -> str:
    """Removes the spaces that a decoder put around Chinese characters, marks and parts of numbers."""
    for pattern, put in _RULES:
        text = pattern.sub(put, text)
    return text.strip()
