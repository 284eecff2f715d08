"""Spans of characters with a label, as files have them: lists of spans, or a tag for each token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from toolkit.data.columns import USUAL_TEXT, find_columns
from toolkit.data.table import Rows, Table
from toolkit.errors import UserError, listing

USUAL_SPANS = ("entities", "spans", "ents", "label", "labels", "annotations", "ner_tags", "tags",
               "实体", "标注", "标签")  # fmt: skip
USUAL_TOKENS = ("tokens", "words", "chars")
SCHEMES = ("BIO", "BMESO", "BIESO", "BILUO")
"""B begins a span, I or M continues it, E or L ends it; S or U is a whole one; O is outside."""
_TAG = re.compile("O|[BIMESLU]-.+")
_CJK = re.compile(
    "[\u2e80-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]"
)
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


def spans_of_tags(tags: Sequence[str], closes: bool) -> list[tuple[int, int, str]]:
    """The tags of a text's tokens -> (first token, last token + 1, label) of each span. `closes`:
    the scheme marks the last token of a span. Raises ValueError(the token's place, why)."""
    spans: list[tuple[int, int, str]] = []
    current = ""  # the label of the span that may go on
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, label = tag.partition("-")
        if prefix in "IMEL":
            if label != current:
                raise ValueError(place, f"{tag} continues no span: begin it with B-{label}")
            first, _, _ = spans.pop()
            spans.append((first, place + 1, label))
        elif current and closes:
            raise ValueError(place - 1, f"the span of {current} has no last token (E or L)")
        elif prefix != "O":
            spans.append((place, place + 1, label))
        current = label
        if prefix in "OESLU":
            current = ""
    return spans


def join_tokens(
    tokens: Sequence[str], separator: str | None
) -> tuple[str, list[tuple[int, int]]]:
    """The text of these tokens, and the characters of each. `separator` None: a space, but
    nothing beside a Chinese or Japanese character."""
    text = ""
    places = []
    for token in tokens:
        between = separator
        if separator is None:
            is_cjk = text and (_CJK.match(text[-1]) or _CJK.match(token[:1]))
            between = "" if is_cjk else " "
        if text:
            text += between or ""
        places.append((len(text), len(text) + len(token)))
        text += token
    return text, places


# --- tables of tokens and tags


def with_texts(table: Table, settings: Any) -> Table:
    """A table of tokens and tags as one of texts and spans, in the same columns; another one as it
    is. `settings`: the section of the data."""
    return Table(cache(partial(_load, table, settings)), table.name, table.digest)


def _load(table: Table, settings: Any) -> Rows:
    """Raises UserError naming the row of a fault in its tokens or tags."""
    import datasets

    rows = table.load()
    tokens_column = _list_column(table, settings.text_column, USUAL_TOKENS)
    tags_column = _list_column(table, settings.spans_column, USUAL_SPANS)
    has_text = find_columns(table, None, "text_column", USUAL_TEXT)
    if not tokens_column or (has_text and not tags_column):
        return rows
    separator = {"space": " ", "none": ""}.get(settings.token_separator)
    if separator is None and _are_characters(table, tokens_column):
        separator = ""
    texts = []
    all_places = []
    for row, tokens in _cells(table, tokens_column):
        if not all(tokens):
            raise UserError(f"{table.where(row)}: a token is empty")
        text, places = join_tokens(tokens, separator)
        texts.append(text)
        all_places.append(places)
    columns: dict[str, list[Any]] = {tokens_column: texts}
    if tags_column:
        columns[tags_column] = _spans_of_rows(table, tags_column, all_places)
    return Rows(datasets.Dataset.from_dict(columns), rows.files)


def _list_column(table: Table, name: str | None, usual: Sequence[str]) -> str:
    """The column of this name, or of a usual one, if it holds lists of texts or of class ids."""
    for column in [name] if name else usual:
        items = getattr(table.rows.features.get(column), "feature", None)
        if getattr(items, "dtype", None) in ("string", "large_string", "int64"):
            return str(column)
    return ""


def _are_characters(table: Table, column: str) -> bool:
    return all(len(token) == 1 for _, tokens in _cells(table, column) for token in tokens)


def _cells(table: Table, column: str) -> Iterator[tuple[int, list[Any]]]:
    """(row, its list), an empty one for none."""
    for numbers, (cells,) in table.cells((column,)):
        for row, cell in zip(numbers.tolist(), cells, strict=True):
            yield row, cell or []


def _spans_of_rows(
    table: Table, column: str, all_places: Sequence[Sequence[tuple[int, int]]]
) -> list[list[dict[str, Any]]]:
    """The spans of each row, from its tags and the characters of its tokens."""
    # of class ids in a data set of the hub
    names = getattr(table.rows.features[column].feature, "names", None)
    closes = _scheme_closes(table, column, names)
    spans = []
    for (row, cell), places in zip(_cells(table, column), all_places, strict=True):
        tags = _tags(cell, names)
        if len(tags) != len(places):
            count = f"{len(places)} tokens and {len(tags)} tags"
            raise UserError(f"{table.where(row)}: {count}")
        try:
            of_tokens = spans_of_tags(tags, closes)
        except ValueError as error:
            place, why = error.args
            raise _fault(table, row, place, why) from error
        spans.append(
            [
                {"start": places[first][0], "end": places[end - 1][1], "label": label}
                for first, end, label in of_tokens
            ]
        )
    return spans


def _scheme_closes(table: Table, column: str, names: Sequence[str] | None) -> bool:
    """Whether the tags of a table mark the last token of a span. Raises UserError naming the first
    tag of none of SCHEMES."""
    prefixes: set[str] = set()
    for row, cell in _cells(table, column):
        for place, tag in enumerate(_tags(cell, names)):
            prefixes.add(tag[:1])
            if not _TAG.fullmatch(tag) or not any(map(prefixes.issubset, SCHEMES)):
                why = f"tag {tag!r} fits no scheme ({listing(SCHEMES)}): B-PER, I-PER, O"
                raise _fault(table, row, place, why)
    return not prefixes.issubset("BIO")


def _tags(cell: Sequence[Any], names: Sequence[str] | None) -> list[str]:
    if names:
        return [names[number] for number in cell]
    return list(map(str, cell))


def _fault(table: Table, row: int, place: int, why: str) -> UserError:
    """`place`: of the token, from 0."""
    where = f"{table.where(row)}, token {place + 1}"
    if "line" in table.rows.column_names:
        where += f" (line {table.rows[row]['line'] + place})"
    return UserError(f"{where}: {why}")
