"""Which columns of a table hold the texts, and which what is to be predicted.

A setting names them, several as `a,b`; else one with a usual name is taken, or the only one that
holds texts. Where several are possible, the user has to choose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from toolkit.data.label_cells import distinct_cells
from toolkit.data.table import Table
from toolkit.errors import UserError, listing

USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "article",
              "文本", "内容", "评论", "评论内容", "正文")  # fmt: skip
USUAL_LABELS = ("label", "labels", "sentiment", "emotion", "category", "class", "target", "intent",
                "topic", "score", "tags", "rating", "标签", "类别", "情感", "分类", "评分", "标注")  # fmt: skip
_NUMBER = re.compile(r"[-+\d.,e\s]*", re.IGNORECASE)
_ASCII_WORD = re.compile(r"[!-~]*")
_FEW_VALUES = 50


def find_columns(
    table: Table, value: str | None, setting: str, usual: tuple[str, ...]
) -> tuple[str, ...]:
    """The columns that the value of a setting names, several as `a,b`; without a value, one with a
    usual name, or none. Raises UserError when one is missing."""
    if value is None:
        names = reversed(table.rows.column_names)  # the first of equal ones wins
        lowered = {name.lower().strip(): name for name in names}
        return tuple(lowered[name] for name in usual if name in lowered)[:1]
    columns = table.columns_of(value)
    for name in columns:
        table.require(name, setting)
    return tuple(columns)


def has_usual(cells: Iterable[str], usual: tuple[str, ...]) -> bool:
    """Whether one of the cells of a line is a usual name of a column."""
    return any(cell.lower().strip(' "') in usual for cell in cells)


def require_columns(
    table: Table, value: str | None, setting: str, usual: tuple[str, ...]
) -> tuple[str, ...]:
    """As `find_columns`. Raises UserError for none, too."""
    columns = find_columns(table, value, setting, usual)
    if not columns:
        raise unclear_column(table, setting, table.rows.column_names)
    return columns


def find_texts(
    table: Table, text: str | None, pair: str | None, excluded: Iterable[str] = ()
) -> tuple[str, ...]:
    """The column of texts, and that of second texts if `pair` names one; `a,b` are several columns
    that are read as one text. Without `text`, a column with a usual name, or the only one of texts
    that is not `excluded`. Raises UserError if none or several are possible."""
    first = ",".join(find_columns(table, text, "text_column", USUAL_TEXT))
    if not first:
        first = _only_texts(table, {*excluded, pair})
    if pair is None:
        return (first,)
    if pair in table.columns_of(first):
        raise UserError(f"--text_pair {pair} is the first text's column too: name another")
    return first, ",".join(find_columns(table, pair, "text_pair", ()))


def _only_texts(table: Table, excluded: set[str | None]) -> str:
    """The only column that may hold texts. Raises UserError if there are none or several."""
    others = [name for name in table.rows.column_names if name not in excluded]
    texts = [name for name in others if _contains_text(table, name)]
    if len(texts) != 1:
        raise unclear_column(table, "text_column", texts or others)
    return texts[0]


def _contains_text(table: Table, column: str, other: re.Pattern[str] = _NUMBER) -> bool:
    """Not numbers (strings in CSV), or what else `other` matches, and not lists."""
    kind = getattr(table.rows.features[column], "dtype", None)
    if kind not in ("string", "large_string"):
        return False
    cells = table.rows[:100][column]
    return not all(other.fullmatch(str(cell or "")) for cell in cells)


def header_notes(table: Table, text: str) -> Iterator[str]:
    """A line if a column was found by its texts: its name may be the first of them."""
    if text.lower() not in USUAL_TEXT and table.load().advice:
        yield f"the text is read from column {text!r}: {table.load().advice}"


def likely_labels(table: Table, names: Iterable[str]) -> list[str]:
    """Those of the columns that have few values, each in several rows."""
    most = min(_FEW_VALUES, len(table) // 2)
    return [
        name
        for name in names
        if _is_plain(table, name) and 2 <= len(distinct_cells(table, name, most)) <= most
    ]


def likely_texts(table: Table, names: Iterable[str]) -> list[str]:
    """Those of the columns that hold texts, not numbers or ids."""
    return [name for name in names if _contains_text(table, name, _ASCII_WORD)]


def _is_plain(table: Table, column: str, has_lists: bool = True) -> bool:
    """Whether the cells, or the items of their lists, are texts or numbers, not objects."""
    feature = table.rows.features[column]
    if has_lists:
        feature = getattr(feature, "feature", feature)
    return hasattr(feature, "dtype")


def unclear_column(
    table: Table, setting: str, names: list[str], has_objects: bool = False
) -> UserError:
    """The error if it is unclear which column a setting means, and what to pass. `has_objects`: it
    may hold lists of objects."""
    what = setting.removesuffix("_column")
    is_text = setting == "text_column"
    plain = names
    if not has_objects:
        plain = [name for name in names if _is_plain(table, name, has_lists=not is_text)]
    remedy = "there is no other than the text"
    if plain:
        remedy = f"name one of {listing(plain)} with --{setting}"
    elif names:
        remedy = f"{listing(names)} holds lists or objects: make a column of the {what}"
    if is_text and len(plain) > 1:
        remedy += "; recipes/cls.py reads pairs with --text_pair"
    if table.load().advice:
        remedy += f"; {table.load().advice}"
    return UserError(f"{table.name}: which column is the {what}? {remedy}")
