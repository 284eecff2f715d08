"""Compares a tokenizer with what it should do, on fixed texts that show what goes wrong, and on
those of a run."""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import BertTokenizer
from transformers.utils import cached_file

from toolkit.config import PretrainedSettings
from toolkit.data.jieba_tokenizer import MARK
from toolkit.data.table import Table
from toolkit.demo import model_path

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

_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff]")
"""Chinese and Japanese characters, Korean syllables."""
_CHINESE_WORD = re.compile(r"[\u3400-\u9fff]{2}")
_LIMIT = 512


def checked_texts(pairs: bool = False) -> list[tuple[str, ...]]:
    """Each text of `TEXTS`, the last one repeated; for pairs each with the first one."""
    texts = [*TEXTS[:-1], LONG * TIMES]
    if pairs:
        return [(text, TEXTS[0]) for text in texts]
    return [(text,) for text in texts]


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


def tokenizer_notes(settings: PretrainedSettings, tokenizer: Any) -> Iterator[str]:
    """Lines on files of the model's folder that would make other tokens of `TEXTS` than the
    tokenizer that transformers has made of them; none where a setting changes its tokens."""
    name, is_changed = settings.model_name_or_path, settings.do_lower_case is not None
    if name is None or is_changed or tokenizer.init_kwargs.get(MARK):
        return
    config = cached_file(model_path(name), "config.json", local_files_only=True)
    folder = Path(str(config)).parent
    texts = checked_texts()[:-1]  # the last one is about truncation
    # without truncation, which would be saved with the model
    ids = [list(tokenizer(*each, verbose=False)["input_ids"]) for each in texts]
    of_file = ids_of_file(folder, tokenizer, texts, _LIMIT)
    difference = of_file and first_difference(tokenizer, ids, of_file)
    if difference:
        inputs = json.dumps(tokenizer.model_input_names)
        yield (
            f"this run reads texts with transformers' {type(tokenizer).__name__}, and "
            f"{folder / 'tokenizer.json'} makes other tokens ({difference}): if the file is right, put "
            f'"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": {inputs} into '
            "tokenizer_config.json"
        )
    if isinstance(tokenizer, BertTokenizer):
        yield from _wordpiece_notes(folder / "vocab.txt", tokenizer, texts, ids)


def _wordpiece_notes(
    file: Path, tokenizer: Any, texts: Sequence[tuple[str, ...]], ids: list[list[int]]
) -> Iterator[str]:
    words = set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens)
    capitals = sum(word != word.lower() for word in words)
    # 0.0003 in uncased vocabularies, 0.3 in bert-base-cased's
    if tokenizer.do_lower_case and capitals > 0.05 * len(words):
        yield (
            f"the tokenizer lower-cases texts, and {capitals} tokens of its vocabulary have capitals: "
            "pass --do_lower_case false if the model was trained with them"
        )
    if not file.is_file():
        return
    # takes 0.1 s: BERT's algorithm in Python, without the library `tokenizers`
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    names = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
    options = {name: getattr(tokenizer, name) for name in names}
    difference: str | None = "it is no text in UTF-8"
    with contextlib.suppress(UnicodeDecodeError):
        plain = BertTokenizerLegacy(str(file), **options, **tokenizer.special_tokens_map)
        difference = first_difference(tokenizer, ids, token_ids(plain, texts, _LIMIT))
    if difference:
        yield (
            f"this run reads texts with a tokenizer that makes other tokens than WordPiece with {file} "
            f"({difference}): remove it, or, if it is the model's, tokenizer.json"
        )


def spelling_notes(table: Table, tokenizer: Any) -> Iterator[str]:
    """A line on training texts (of 100 the first 300 characters) that the tokenizer spells, which
    makes no unknown tokens: it lost its pieces, or the model does not know the language."""
    # a small vocabulary is one of bytes, letters or amino acids, which spells by design
    if len(tokenizer) < 1000 or type(tokenizer).__name__ == "CanineTokenizer":
        return
    words = [
        _words_of(text[:300])
        for columns in table.sample(100).texts()
        for texts in columns
        for text in texts
    ]
    letters = sum(len(each) - each.count(" ") for each in words)
    characters = sum(len(_CJK.findall(each)) for each in words)
    options = {"add_special_tokens": False, "verbose": False}
    tokens = sum(map(len, tokenizer(words, **options)["input_ids"]))
    if tokens > 0.9 * letters + 0.6 * characters:
        yield (
            f"train: {tokens / letters:.1f} tokens a letter, where 0.2 to 0.5 are usual, and 0.6 to 1 a "
            "Chinese character: take tokenizer.json from where the model was published, or choose a "
            "--model_name_or_path that reads the language"
        )
    elif tokens > 0.9 * letters and isinstance(tokenizer, BertTokenizer):
        chinese = sum(bool(_CHINESE_WORD.search(word)) for word in tokenizer.get_vocab())
        if chinese > 5000:
            yield (
                f"train: each Chinese character is a token, and the vocabulary has {chinese} Chinese "
                "words: pass --tokenizer jieba if the model was trained with jieba's"
            )


def _words_of(text: str) -> str:
    """Its words of two letters or more; letters with their marks."""
    letters = [each if unicodedata.category(each)[0] in "LM" else " " for each in text]
    return " ".join(word for word in "".join(letters).split() if len(word) > 1)
