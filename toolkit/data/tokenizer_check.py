"""Compares a tokenizer with what it should do, on fixed texts that show what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from toolkit.data.jieba_tokenizer import MARK

LONG = "long 长 text 文本 "
TIMES = 1500
"""The last text is `LONG` so many times: of about 20,000 characters, more than a model reads."""
TEXTS = (
    "A fine film with a good story, and I don't know why it isn't famous.",
    "这家酒店的房间很干净，服务也不错，就是早餐太贵了。",
    "Ünïcode: naïve café, Straße, İstanbul; it costs 10,000 € (3.5 %).",
    "２０２６年１１月，Ｇｏｏｇｌｅ发布iPhone17？ 繁體字、かな、한국어、𠮷野家、𪚥。",
    "NBA总决赛 UPPER lower CamelCase snake_case https://example.org/a?b=1 @name",
    "tabs\tand\nline breaks,\u00a0no-break\u200bspaces \x07 and 😀 👩‍👧 unknown ☃ signs",
    "",
    "good",
    "不",
    LONG,
)
"""Chinese, mixed scripts, capitals, accents, full-width forms, characters beyond the basic plane,
control characters, emoji, nothing, one word, and a long text (`LONG`, `TIMES` times)."""


def checked_texts(pairs: bool = False) -> list[tuple[str, ...]]:
    """Each text of `TEXTS`, the last one repeated; of pairs each with the one after it."""
    texts = [*TEXTS[:-1], LONG * TIMES]
    if not pairs:
        return [(text,) for text in texts]
    return list(zip(texts, [*texts[1:], texts[0]], strict=True))


def token_ids(
    tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int
) -> list[list[int]]:
    """The ids of each text or pair, without padding, as transformers makes them."""
    options = {"truncation": "longest_first", "max_length": max_length, "verbose": False}
    return [list(tokenizer(*each, **options)["input_ids"]) for each in texts]


def ids_of_file(
    folder: Path, tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int
) -> list[list[int]] | None:
    """The ids as `tokenizers` makes them from tokenizer.json, which servers read and transformers
    partly ignores; None without that file, and where jieba splits the texts first."""
    file = folder / "tokenizer.json"
    if not file.is_file() or tokenizer.init_kwargs.get(MARK):
        return None
    of_file = Tokenizer.from_file(str(file))
    of_file.no_padding()
    of_file.enable_truncation(max_length, direction=tokenizer.truncation_side)
    inputs = [each if len(each) > 1 else each[0] for each in texts]
    return [each.ids for each in of_file.encode_batch(inputs)]


def first_difference(
    tokenizer: Any, found: Sequence[list[int]], expected: Sequence[list[int]]
) -> str | None:
    """Where ids differ first: the number of the text, from 1, that of the token, and the tokens
    there; None where they are equal."""
    for number, (ids, others) in enumerate(zip(found, expected, strict=True), 1):
        if ids != others:
            at = 0
            while ids[at : at + 1] == others[at : at + 1]:
                at += 1
            here = tokenizer.convert_ids_to_tokens(ids[at : at + 3])
            there = tokenizer.convert_ids_to_tokens(others[at : at + 3])
            return f"text {number}, token {at + 1}: {here} instead of {there}"
    return None
