"""Tables of tokens and their tags -> tables of texts and their spans."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

from toolkit.data.columns import USUAL_TEXT, find_columns
from toolkit.data.table import Rows, Table
from toolkit.errors import UserError, listing
from toolkit.features.spans.spans import CJK

USUAL_SPANS = ("entities", "spans", "ents", "label", "labels", "annotations", "ner_tags", "tags",
               "实体", "标注", "标签")  # fmt: skip
USUAL_TOKENS = ("tokens", "words", "chars")
SCHEMES = ("BIO", "BMESO", "BIESO", "BILUO")
"""B begins a span, I or M continues it, E or L ends it; S or U is a whole one; O is outside."""
_TAG = re.compile("O|[BIMESLU]-.+")
_SEPARATORS = {"space": " ", "none": ""}


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
    all_tokens = _lists(table, tokens_column)
    separator = _SEPARATORS.get(settings.token_separator)
    if separator is None and all(
        len(token) == 1 for tokens in all_tokens for token in tokens
    ):
        separator = ""
    texts = []
    all_places = []
    for row, tokens in enumerate(all_tokens):
        if not all(tokens):
            raise UserError(f"{table.where(row)}: a token is empty")
        text, places = join_tokens(tokens, separator)
        texts.append(text)
        all_places.append(places)
    columns: dict[str, list[Any]] = {tokens_column: texts}
    if tags_column:
        columns[tags_column] = list(_spans(table, _lists(table, tags_column), all_places))
    return Rows(datasets.Dataset.from_dict(columns), rows.files)


def _list_column(table: Table, name: str | None, usual: Sequence[str]) -> str:
    """The column of this name, or of a usual one, if it holds lists of texts or of class ids."""
    for column in [name] if name else usual:
        items = getattr(table.rows.features.get(column), "feature", None)
        if getattr(items, "dtype", None) in ("string", "large_string", "int64"):
            return str(column)
    return ""


def _lists(table: Table, column: str) -> list[list[str]]:
    """The list of each row; of class ids their names."""
    names = getattr(table.rows.features[column].feature, "names", None)
    lists = []
    for _, (cells,) in table.cells((column,)):
        for cell in cells:
            items = cell or []
            if names:
                items = [names[number] for number in items]
            lists.append(["" if item is None else str(item) for item in items])
    return lists


def _spans(
    table: Table,
    all_tags: Sequence[Sequence[str]],
    all_places: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[list[dict[str, Any]]]:
    """The spans of each row, from its tags and the characters of its tokens."""
    prefixes: set[str] = set()
    closes = any(tag[:1] in set("ESLU") for tags in all_tags for tag in tags)
    for row, (tags, places) in enumerate(zip(all_tags, all_places, strict=True)):
        if len(tags) != len(places):
            counts = f"{len(places)} tokens and {len(tags)} tags"
            raise UserError(f"{table.where(row)}: {counts}")
        try:
            _check_scheme(tags, prefixes)
            spans = spans_of_tags(tags, closes)
        except ValueError as error:
            place, why = error.args
            where = f"{table.where(row)}, token {place + 1}"
            if "line" in table.rows.column_names:
                where += f" (line {table.rows[row]['line'] + place})"
            raise UserError(f"{where}: {why}") from error
        yield [
            {"start": places[first][0], "end": places[last][1], "label": label}
            for first, last, label in spans
        ]


def _check_scheme(tags: Sequence[str], prefixes: set[str]) -> None:
    """Raises ValueError(place, why) for a tag of none of SCHEMES; adds to the `prefixes` of the
    tags before it."""
    for place, tag in enumerate(tags):
        prefixes.add(tag[:1])
        if not _TAG.fullmatch(tag) or not any(map(prefixes.issubset, SCHEMES)):
            why = f"tag {tag!r} fits no scheme ({listing(SCHEMES)}): B-PER, I-PER, O"
            raise ValueError(place, why)


def spans_of_tags(tags: Sequence[str], closes: bool) -> list[tuple[int, int, str]]:
    """The tags of a text's tokens -> (first token, last token, label) of each span. `closes`:
    the scheme marks the last token of a span. Raises ValueError(the token's place, why)."""
    spans: list[tuple[int, int, str]] = []
    current = ""  # the label of the span that may go on
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, label = tag.partition("-")
        if prefix in "IMEL":
            if label != current:
                raise ValueError(place, f"{tag} continues no span: begin it with B-{label}")
            first, _, _ = spans.pop()
            spans.append((first, place, label))
        elif current and closes:
            raise ValueError(place - 1, f"the span of {current} has no last token (E or L)")
        elif prefix != "O":
            spans.append((place, place, label))
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
        if text and separator is not None:
            text += separator
        elif text and not CJK.match(text[-1]) and not CJK.match(token):
            text += " "
        places.append((len(text), len(text) + len(token)))
        text += token
    return text, places
