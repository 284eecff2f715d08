"""Decodes token ids to text without the spaces that tokenizers add (around each Chinese character,
for example)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA = "\u3040-\u30ff\u31f0-\u31ff"
# CJK punctuation, without the quotes, dash and ellipsis that English uses too
_MARKS = "\u3001-\u3003\u3008-\u301f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"

# Applied in this order.
_RULES = tuple(
    (re.compile(pattern), put)
    for pattern, put in (
        (rf"(?<=[{HAN}{KANA}{_MARKS}])\s+|\s+(?=[{HAN}{KANA}{_MARKS}])", ""),
        (r"\s+(?=[.,!?;:%)\]}”’…])", ""),  # word . -> word.
        (r"(?<=[(\[{“‘$£€])\s+", ""),  # ( word -> (word
        (r"(?<=\w)\s?'\s(?=(?:s|t|re|ve|m|ll|d)\b)", "'"),  # don ' t -> don't
        (r"([-—~>+=*.…]) (?=\1)", r"\1"),  # - - -> --
        (r"(?<=[^\W_]) - (?=[^\W_])", "-"),  # five - year -> five-year
        (r"(?<=\d\.) (?=\d)", ""),  # 3. 5 -> 3.5
        (r"(?<=\d:) (?=\d\d\b)", ""),  # 10: 30 -> 10:30
        (
            r"(?<![\d,])(\d{1,3},) (?=\d{3}(?!\d))",
            r"\1",
        ),  # 10, 000 -> 10,000, but not 2019, 200
        (r"(?<=\d,\d{3},) (?=\d{3}(?!\d))", ""),  # and its millions
        (r"\s+", " "),
    )
)


def readable(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids, without special tokens ([UNK] included), for any tokenizer.

    `华 为 发 布 mate 60 .` -> `华为发布mate 60.`: removes spaces next to Chinese characters and
    punctuation, and keeps those between Latin words. Changes spaces only,
    but not always back to the original text (`a - b` -> `a-b`).
    """
    text = tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # the first token continues a word
    return without_token_spaces(re.sub(r"^##(?=\w)", "", text))


def without_token_spaces(text: str) -> str:
    """Removes spaces around Chinese characters, punctuation and parts of numbers."""
    for pattern, put in _RULES:
        text = pattern.sub(put, text)
    return text.strip()
