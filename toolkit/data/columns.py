"""Which columns of a table hold the texts, and which what is to be predicted.

A setting names them, several as `a,b`; else one with a usual name is taken, or the only one that
holds texts. Where several are possible, the user has to choose."""

from __future__ import annotations

import re
from collections.abc import Iterable

from toolkit.data.table import Table
from toolkit.errors import UserError, listing

USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "article",
              "文本", "内容", "评论", "评论内容", "正文")  # fmt: skip
_NUMBER = re.compile(r"[-+\d.,e\s]*", re.IGNORECASE)


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


def _contains_text(table: Table, column: str) -> bool:
    """Not numbers (strings in CSV) and not lists."""
    kind = getattr(table.rows.features[column], "dtype", None)
    if kind not in ("string", "large_string"):
        return False
    cells = table.rows[:100][column]
    return not all(_NUMBER.fullmatch(str(cell or "")) for cell in cells)


def unclear_column(table: Table, setting: str, names: list[str]) -> UserError:
    """The error if it is unclear which column a setting means, and what to pass."""
    remedy = "there is no other than the text"
    if names:
        remedy = f"name one of {listing(names)} with --{setting}"
    if table.load().advice:
        remedy += f"; {table.load().advice}"
    what = setting.removesuffix("_column")
    return UserError(f"{table.name}: which column is the {what}? {remedy}")
