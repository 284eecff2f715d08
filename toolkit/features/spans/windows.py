"""Spans of characters <-> a tag for each token, of texts in windows.

A text of more than `max_length` tokens becomes several samples, windows that overlap. A token
counts in one window only, where it has most context; elsewhere its tag is IGNORED: it has no loss
and no answer there."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from toolkit.data.batches import IGNORED
from toolkit.errors import UserError
from toolkit.features.spans.spans import CJK, Span

DTYPES = {
    "input_ids": np.int32,
    "tags": np.int16,
    "starts": np.int32,
    "ends": np.int32,
    "pieces": np.int32,
}


class Window(NamedTuple):
    """The arrays (tokens,) of a window, of these DTYPES; special tokens have no characters."""

    input_ids: np.ndarray
    tags: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    pieces: np.ndarray


class Tokens(NamedTuple):
    """The tokens of a text, without special ones, and the characters of each; none if it is white
    space."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    pieces: np.ndarray
    """How many tokens each one's word has."""


def pieces_of_words(text: str, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """(tokens,) how many tokens the word of each has. Words are between white space; a Chinese or
    Japanese character is a word."""
    goes_on = np.zeros(len(starts), bool)
    for place in np.flatnonzero(starts[1:] == ends[:-1]) + 1:
        border = starts[place]
        goes_on[place] = not any(map(CJK.match, text[border - 1 : border + 1]))
    words = np.cumsum(~goes_on)
    return np.bincount(words, minlength=1)[words]


def tag_names(labels: Sequence[str]) -> list[str]:
    """`O`, and for each label the tags of a span's first token and of its others (BIO)."""
    return ["O", *(f"{prefix}-{label}" for label in labels for prefix in "BI")]


def encode_tags(
    spans: Sequence[Span], tokens: Tokens, labels: Sequence[str]
) -> tuple[np.ndarray, int]:
    """(tokens,) the tags of the tokens that have characters of these spans, and how many spans
    cannot be found again: they begin or end inside a token."""
    tags = np.zeros(len(tokens.ids), np.int16)
    lost = 0
    for span in spans:
        is_inside = (tokens.starts < span.end) & (tokens.ends > span.start)
        places = np.flatnonzero(is_inside & (tokens.ends > tokens.starts) & (tags == 0))
        tags[places] = 2 + 2 * labels.index(span.label)
        tags[places[:1]] -= 1
        characters = (
            tokens.starts[places[:1]].max(initial=-1),
            tokens.ends[places].max(initial=-1),
        )
        lost += characters != (span.start, span.end)
    return tags, lost


def decode_tags(
    tags: np.ndarray,
    texts: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    probabilities: np.ndarray,
) -> Iterator[tuple[int, int, int, int, float]]:
    """The spans of tokens, (tokens,) each: its tag, its text, its characters, and the probability
    of its tag -> (text, start, end, label, the mean probability) of each span. An I that does not
    go on a span begins one."""
    labels = (tags + 1) // 2 - 1  # -1: outside
    goes_on = np.zeros(len(tags), bool)
    goes_on[1:] = (labels[1:] == labels[:-1]) & (texts[1:] == texts[:-1])
    is_inside = labels >= 0
    begins = is_inside & ~(goes_on & (tags % 2 == 0))
    firsts = np.flatnonzero(begins[is_inside])  # among the tokens inside
    counts = np.diff(np.append(firsts, is_inside.sum()))
    columns = (
        texts[begins],
        starts[begins],
        np.maximum.reduceat(ends[is_inside], firsts),
        labels[begins],
        np.add.reduceat(probabilities[is_inside], firsts) / counts,
    )
    return zip(*(column.tolist() for column in columns), strict=True)


def window_slices(count: int, room: int, stride: int) -> Iterator[tuple[slice, slice]]:
    """(The tokens of a window, those of them that count there) for a text of `count` tokens, in
    windows of at most `room` of which `stride` are also in the next one. Two windows divide what
    they share in its middle."""
    begin = 0
    for first in range(0, max(1, count - stride), room - stride):
        last = min(first + room, count)
        end = last
        if last < count:
            end -= stride // 2
        yield slice(first, last), slice(begin, end)
        begin = end


class WindowReader:
    """Texts -> their tokens, and the windows of these."""

    def __init__(self, tokenizer: Any, max_length: int, stride: int | None) -> None:
        """`max_length`, `stride`: tokens of a window, and those that it shares with the next one;
        None: a quarter. Raises UserError if a window then has no token of its own."""
        self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()
        encoded = tokenizer("a", return_special_tokens_mask=True)
        ids, mask = encoded["input_ids"], encoded["special_tokens_mask"]
        first = mask.index(0)
        last = len(mask) - mask[::-1].index(0)
        self.prefix, self.suffix = ids[:first], ids[last:]
        self.room = max_length - len(self.prefix) - len(self.suffix)
        self.stride = max_length // 4 if stride is None else stride
        if self.stride >= self.room:
            raise UserError(
                f"windows of {self.room} tokens and special ones (--max_length {max_length}) "
                f"cannot share {self.stride} (--stride): pass fewer"
            )

    def tokens(self, texts: Sequence[str]) -> Iterator[Tokens]:
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            starts = []
            ends = []
            for start, end in encoding.offsets:
                word = text[start:end]
                starts.append(end - len(word.lstrip()))
                ends.append(start + len(word.rstrip()))
            ids, first, last = (
                np.array(each, np.int64) for each in (encoding.ids, starts, ends)
            )
            yield Tokens(ids, first, last, pieces_of_words(text, first, last))

    def windows(self, tokens: Tokens, tags: np.ndarray) -> Iterator[Window]:
        """The windows of a text with these tags."""
        before, after = len(self.prefix), len(self.suffix)
        for part, counting in window_slices(len(tokens.ids), self.room, self.stride):
            size = before + part.stop - part.start + after
            window = Window(*(np.zeros(size, dtype) for dtype in DTYPES.values()))
            middle = slice(before, size - after)
            window.input_ids[:] = [*self.prefix, *tokens.ids[part], *self.suffix]
            window.starts[middle] = tokens.starts[part]
            window.ends[middle] = tokens.ends[part]
            window.pieces[middle] = tokens.pieces[part]
            window.tags[:] = IGNORED
            first = before + counting.start - part.start
            last = before + counting.stop - part.start
            has_text = window.ends[first:last] > window.starts[first:last]
            window.tags[first:last] = np.where(has_text, tags[counting], IGNORED)
            yield window


def arrays_of(windows: Sequence[Sequence[Window]]) -> dict[str, np.ndarray]:
    """The windows of each text -> the arrays of a `SpanSplit`, whose texts are rows 0, 1, ..."""
    arrays = {}
    flat = [window for of_text in windows for window in of_text]
    for name, parts in zip(DTYPES, zip(*flat, strict=True), strict=True):
        arrays[name] = np.concatenate(parts)
    arrays["offsets"] = np.append(0, np.cumsum([len(window.tags) for window in flat]))
    arrays["rows"] = np.arange(len(flat))
    arrays["labels"] = np.array(
        [np.sum(1 / window.pieces[window.tags != IGNORED]) for window in flat]
    )
    arrays["text_rows"] = np.arange(len(windows))
    arrays["text_index"] = np.repeat(arrays["text_rows"], list(map(len, windows)))
    return arrays
