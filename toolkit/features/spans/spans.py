"""Labelled spans of characters, as a file has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

CJK = re.compile(
    "[\u2e80-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]"
)
"""A Chinese or Japanese character."""
_KEYS = (("start", "start_offset"), ("end", "end_offset"), ("label",))
_FORMS = '{"start": 0, "end": 2, "label": "PER"} or [0, 2, "PER"]'


class Span(NamedTuple):
    """Characters `start` to `end` (exclusive) of a text."""

    start: int
    end: int
    label: str


def parse_spans(cell: Any, text: str) -> list[Span]:
    """The spans of a cell (a list, or JSON), in the order of the text. Raises ValueError for what
    is none, lies outside the text, is empty, or overlaps another one."""
    try:
        items = json.loads(cell) if isinstance(cell, str) else cell
        spans = sorted(map(_parse_span, items))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"a span is {_FORMS}, not {str(cell)[:80]}") from error
    end = 0
    for place, span in enumerate(spans):
        name = f"span {span.start} to {span.end} ({span.label})"
        if not 0 <= span.start <= span.end <= len(text):
            raise ValueError(f"{name} is outside the text of {len(text)} characters")
        if not text[span.start : span.end].strip():
            raise ValueError(f"{name} is empty")
        if span.start < end:
            other = spans[place - 1]
            why = "crosses"
            if span.end <= other.end:
                why = "lies within"
            raise ValueError(
                f"{name} {why} span {other.start} to {other.end} ({other.label}): a character has "
                "one label, keep one of them"
            )
        end = span.end
    return spans


def _parse_span(item: Any) -> Span:
    if isinstance(item, Mapping):
        # Arrow fills the keys that other rows have with None
        present = [
            [item[key] for key in keys if item.get(key) is not None] for keys in _KEYS
        ]
        item = [values[0] if values else None for values in present]
    start, end, label = item
    if label in (None, ""):
        raise KeyError("label")
    if float(start) % 1 or float(end) % 1:
        raise ValueError("no number of characters")
    return Span(int(start), int(end), str(label))
