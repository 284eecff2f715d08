"""The cells of label columns -> names or numbers.

A cell of several labels is a list, a list as JSON, `["a", "b"]`, or names with a separator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from toolkit.data.table import Table

NO_LABEL = (
    "no label: fill it or remove the row, or pass --drop_empty_text, which leaves it out"
)
_MAX_DISTINCT = 200_000
"""Distinct values that are read to infer a column's type: more are numbers, or no labels."""


def read_cells(
    table: Table, columns: Sequence[str]
) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """Batches of (row numbers, cells): lists of cells for several columns; `ClassLabel` ids as
    names."""
    feature = class_feature(table, columns[0])
    for numbers, values in table.cells(columns):
        if len(columns) > 1:
            yield numbers, list(map(list, zip(*values, strict=True)))
        elif feature:
            yield numbers, [_names_of_ids(cell, feature) for cell in values[0]]
        else:
            yield numbers, values[0]


def hashable(cells: list[Any]) -> list[str]:
    """Equal for equal cells; lists have no hash."""
    return [cell if isinstance(cell, str) else repr(cell) for cell in cells]


def distinct_cells(table: Table, column: str) -> list[Any]:
    """The distinct cells of a column that are not missing; of the first rows, if they are more than
    _MAX_DISTINCT."""
    distinct: dict[str, Any] = {}
    for _, cells in read_cells(table, (column,)):
        distinct |= zip(hashable(cells), cells, strict=True)
        if len(distinct) > _MAX_DISTINCT:
            break
    return [cell for cell in distinct.values() if not is_missing(cell)]


def class_feature(table: Table, column: str) -> Any:
    """The `ClassLabel` feature of a column or of its lists' items, or None."""
    from datasets import ClassLabel

    if column not in table.rows.features:
        return None
    feature = table.rows.features[column]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, ClassLabel) else None


def _names_of_ids(cell: Any, feature: Any) -> Any:
    """Ids -> names; -1, an unlabelled row of a hub data set, -> None."""
    if isinstance(cell, list):
        return [_names_of_ids(item, feature) for item in cell]
    if cell is None or cell < 0:
        return None
    return feature.int2str(int(cell))


def to_float(value: Any) -> float | None:
    """None for what is no number."""
    if "_" in str(value):  # Python reads 1_5 as 15
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def is_missing(cell: Any) -> bool:
    """None, or NaN."""
    return cell is None or cell != cell


def is_blank(cell: Any) -> bool:
    """Missing, or white space."""
    return is_missing(cell) or not str(cell).strip()


def class_name(cell: Any) -> str:
    """The text of a cell; `2.0`, which a reader or a spreadsheet makes of `2`, becomes `2`."""
    if is_missing(cell):
        return ""
    text = str(cell).strip()
    return text.split(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text


def finite_number(cell: Any) -> float:
    """Raises ValueError."""
    if is_blank(cell):
        raise ValueError(NO_LABEL)
    number = to_float(cell)
    largest = float(np.finfo(np.float32).max)
    if number is None or not abs(number) <= largest:
        raise ValueError(
            f"the label {cell!r} is not a number in the range of float32: correct it, or pass "
            "another --problem_type"
        )
    return number


def is_list(cell: Any) -> bool:
    """Whether a cell is a list, or looks like one in JSON."""
    if isinstance(cell, str):
        text = cell.strip()
        return text.startswith("[") and text.endswith("]")
    return isinstance(cell, list)


def class_names(cell: Any, separator: str | None) -> list[Any]:
    """The labels of a cell: a list, a list as JSON, or names with the separator between them; of an
    empty string none. Raises ValueError."""
    if isinstance(cell, list):
        return cell
    text = "" if is_missing(cell) else str(cell).strip()
    if separator:
        parts = [part.strip() for part in text.split(separator)]
        return [part for part in parts if part]
    if not text:
        return []
    try:
        items = json.loads(text)
    except ValueError:
        items = None
    if not isinstance(items, list):
        raise ValueError(
            f'{text[:60]!r} is no list of labels: write JSON, ["a", "b"], or pass --label_separator'
        )
    return items
