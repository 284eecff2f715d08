"""Words that a tokenizer does not know: which, and what makes it read them."""

from __future__ import annotations

import copy
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from toolkit.data.table import Table
from toolkit.data.token_files import Counts
from toolkit.errors import UserError, listing

_WARN_TEXTS = 0.01
"""A share of the texts."""
_MAX_TOKENS = 0.5
"""A share of the tokens."""
_MIN_READ = 0.05
"""A share of the unknown words that a remedy must read beyond those named before it."""
_MOST_TEXTS = 500
_MOST_CHARACTERS = 5000
_MOST_WORDS = 1000
_SHOWN_CHARACTERS = 20


def unknown_notes(
    split: str, counts: Counts, table: Table, tokenizer: Any
) -> Iterator[str]:
    """What the model cannot read of the texts of `table`, if that is in more than a few training
    texts. Raises UserError if most tokens are unknown."""
    has_unknown = np.concatenate(counts.has_unknown)
    share = float(has_unknown.mean())
    is_foreign = counts.unknown > _MAX_TOKENS * counts.tokens
    if not is_foreign and ("train" not in split or share < _WARN_TEXTS):
        return
    words = _describe(tokenizer, table.select(np.flatnonzero(has_unknown)))
    line = f"{split}: {100 * share:.3g} % of the texts have words unknown to the model: {words}"
    if is_foreign:
        raise UserError(
            f"{line}; or choose a --model_name_or_path that reads the language of these texts "
            "(bert-base-chinese, say), as most of the tokens are unknown"
        )
    yield line


def _describe(tokenizer: Any, table: Table) -> str:
    """The most frequent unknown words of some of the texts, and the remedies with which the
    tokenizer reads them."""
    # a copy: calls change its truncation, which would be saved with the model
    tokenizer = copy.deepcopy(tokenizer)
    counts: Counter[str] = Counter()
    for columns in table.sample(_MOST_TEXTS).texts():
        for texts in columns:
            counts.update(_unknown_words(tokenizer, texts))
    words = counts.most_common(_MOST_WORDS)
    parts = [listing(f"{word[:_SHOWN_CHARACTERS]} ({count})" for word, count in words)]
    best = 0.0
    for remedy, change in _remedies(tokenizer):
        read = sum(count for word, count in words if _reads(tokenizer, change(word)))
        share = read / max(1, counts.total())
        if share > best + _MIN_READ:
            parts.append(f"{remedy} {100 * share:.0f} % of them")
            best = share
    return "; ".join(parts)


def _unknown_words(tokenizer: Any, texts: Sequence[str]) -> Iterator[str]:
    if not tokenizer.is_fast:  # it has no offsets
        return
    texts = [text[:_MOST_CHARACTERS] for text in texts]
    encoded = tokenizer(texts, return_offsets_mapping=True, verbose=False)
    rows = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    for text, ids, offsets in rows:
        for token, (start, end) in zip(ids, offsets, strict=True):
            if token == tokenizer.unk_token_id:
                yield text[start:end].strip()


def _reads(tokenizer: Any, word: str) -> bool:
    return tokenizer.unk_token_id not in tokenizer(word)["input_ids"]


def _remedies(tokenizer: Any) -> Iterator[tuple[str, Callable[[str], str]]]:
    """What to do, and what that makes of a word."""
    compose = partial(unicodedata.normalize, "NFKC")
    remedy = "unicodedata.normalize('NFKC', text) in all files"
    keeps_case = getattr(tokenizer, "do_lower_case", None) is False
    if not keeps_case or "A" in tokenizer.get_vocab():
        yield f"{remedy} makes readable", compose
        return
    yield "--do_lower_case true reads", _lower_case
    yield f"{remedy} makes readable", compose
    both = f"--do_lower_case true and {remedy} make readable"
    yield both, lambda word: _lower_case(compose(word))


def _lower_case(word: str) -> str:
    """As BERT's tokenizer does it: without accents, too."""
    letters = unicodedata.normalize("NFD", word.lower())
    return "".join(each for each in letters if unicodedata.category(each) != "Mn")
