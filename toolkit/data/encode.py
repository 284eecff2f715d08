"""Texts -> tokens, a block of texts at a time, by threads.

The tokens are those that `tokenizer(texts, truncation="longest_first", max_length=...)` returns;
of a long text with `head_tokens` its first and its last ones."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from toolkit.data.table import TextBlock
from toolkit.data.tokenizer import head_tokens_of, reading_beginnings
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.utils.progress import Progress

_BLOCK_TEXTS = 2000
# characters per token of max_length: of longer texts only the beginning is tokenized, if that is
# certain to be enough
_LONG_TEXT = 64
_CUT = 16


class Block(NamedTuple):
    """The tokens of some texts."""

    ids: np.ndarray
    """(tokens,) int32, one text after another."""
    lengths: np.ndarray
    """(texts,) int64."""
    types: np.ndarray | None
    """(tokens,) int8, of pairs, if the tokenizer has them."""
    truncated: int
    """Texts that were truncated."""


def encode_blocks(
    tokenizer: Any,
    blocks: Iterable[TextBlock],
    max_length: int,
    total: int,
    what: str = "tokens",
) -> Iterator[Block]:
    """Blocks of texts -> blocks of their tokens, at most `max_length` of each text; the longer text
    of a pair is truncated first. Tokenizes the next texts while the caller writes these. `what`,
    `total` (texts): for progress."""
    # a copy: its truncation setting would be saved with the model by the process that tokenized
    tokenizer = copy.deepcopy(tokenizer)
    # sets the truncation once, before the threads
    tokenizer(["a"], truncation="longest_first", max_length=max_length)
    encode = _encode_slowly
    workers = 1
    if head_tokens_of(tokenizer):
        encode = _encode_ends
    elif getattr(tokenizer, "is_fast", False):
        encode = _encode_fast
        # one waits for the tokenizer's own threads while the other makes arrays
        workers = 2
    bar = Progress(what, total, "texts")
    done = 0
    with ThreadPoolExecutor(workers, "tokenize") as threads:
        pending = []
        for texts in blocks:
            pending.append(threads.submit(encode, tokenizer, max_length, texts))
            if len(pending) > 3:
                block = pending.pop(0).result()
                yield block
                done += len(block.lengths)
                bar.update(done)
        for future in pending:
            yield future.result()
    bar.close()


def _encode_fast(tokenizer: Any, max_length: int, texts: TextBlock) -> Block:
    """By the tokenizer's backend: transformers' own call takes twice as long."""
    inputs: Sequence[Any] = list(zip(*texts, strict=True))
    if len(texts) == 1:
        inputs = cut_long_texts(tokenizer, texts[0], max_length)
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(inputs)
    types = None
    if _has_types(tokenizer, texts):
        types = [each.type_ids for each in encodings]
    truncated = sum(bool(each.overflowing) for each in encodings)
    return _block([each.ids for each in encodings], types, truncated)


def _encode_slowly(tokenizer: Any, max_length: int, texts: TextBlock) -> Block:
    """A tokenizer written in Python."""
    batch = tokenizer(
        *texts,
        truncation="longest_first",
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=_has_types(tokenizer, texts),
    )
    return _block(batch["input_ids"], batch.get("token_type_ids"), 0)


def _encode_ends(tokenizer: Any, max_length: int, texts: TextBlock) -> Block:
    """The first `head_tokens` tokens of a long text, and its last ones. Raises UserError for
    pairs."""
    head = head_tokens_of(tokenizer)
    if len(texts) > 1:
        raise UserError(
            f"pairs cannot be read with head_tokens ({head}, as the model was trained): pass "
            "--truncation_side right in training, or no --text_pair"
        )
    mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    first = mask.index(0) + head  # after [CLS]
    last = max_length - first  # with [SEP]
    ids = tokenizer(list(texts[0]), verbose=False)["input_ids"]
    cut = [each if len(each) <= max_length else each[:first] + each[-last:] for each in ids]
    truncated = sum(len(each) > max_length for each in ids)
    return _block(cut, None, truncated)


def _has_types(tokenizer: Any, texts: TextBlock) -> bool:
    """Whether the tokenizer says which of two texts a token is of."""
    return len(texts) > 1 and "token_type_ids" in tokenizer.model_input_names


def _block(ids: list[list[int]], types: list[list[int]] | None, truncated: int) -> Block:
    """Lists of each text's ids (and token types) -> flat arrays."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    count = int(lengths.sum())
    flat_ids = np.fromiter(itertools.chain.from_iterable(ids), np.int32, count)
    flat_types = None
    if types is not None:
        flat_types = np.fromiter(itertools.chain.from_iterable(types), np.int8, count)
    return Block(flat_ids, lengths, flat_types, truncated)


def cut_long_texts(tokenizer: Any, texts: Sequence[str], max_length: int) -> Sequence[str]:
    """The texts, the very long ones (15 MB take 2.3 GB in the tokenizer) cut if this leaves their
    first `max_length` tokens as they are: each word is tokenized alone, and the cut can only change
    the last words."""
    backend = tokenizer.backend_tokenizer
    limit = _LONG_TEXT * max_length
    places = [place for place, text in enumerate(texts) if len(text) > limit]
    # a segmenter of words needs whole texts
    if not places or tokenizer.truncation_side != "right" or hasattr(backend, "segmenter"):
        return texts
    cut = list(texts)
    starts = [texts[place][: _CUT * max_length] for place in places]
    encodings = backend.encode_batch(starts)
    for place, start, each in zip(places, starts, encodings, strict=True):
        overflowing = [each, *each.overflowing]
        last_word = max(filter(None, each.word_ids), default=0)
        end_word = max(filter(None, overflowing[-1].word_ids), default=0)
        if end_word >= last_word + 3:
            cut[place] = start
    return cut


def encode_texts(
    tokenizer: Any, texts: TextBlock, max_length: int
) -> dict[str, np.ndarray]:
    """`input_ids`, `offsets`, and `token_types` of pairs if there are any."""
    total = len(texts[0])
    parts = [slice(start, start + _BLOCK_TEXTS) for start in range(0, total, _BLOCK_TEXTS)]
    pending = ([column[part] for column in texts] for part in parts)
    blocks = list(encode_blocks(tokenizer, pending, max_length, total))
    ids, lengths, types, _ = zip(*blocks, strict=True)
    arrays = {
        "input_ids": np.concatenate(ids),
        "offsets": np.append(0, np.concatenate(lengths).cumsum()),
    }
    if types[0] is not None:
        arrays["token_types"] = np.concatenate(types)
    return arrays


def truncate_split(split: Split, tokenizer: Any, max_length: int, name: str) -> Split:
    """The same samples with their first `max_length` tokens at most, for a split whose texts are
    saved."""
    tokenizer = reading_beginnings(tokenizer)
    texts = list(zip(*split.saved_texts(), strict=True))
    arrays: dict[str, Any] = encode_texts(tokenizer, texts, max_length)
    if split.token_types is None:  # the model may have none
        arrays.pop("token_types", None)
    return replace(split, name=name, **arrays)
