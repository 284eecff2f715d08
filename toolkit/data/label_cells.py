"""The cells of label columns -> names or numbers.

A cell of several labels is a list, one as JSON or as Python writes it, `["a", "b"]`, or names with
a separator. A list of one name may stand for the name.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from toolkit.data.table import Table

NO_LABEL = "no label: fill it, or remove the row"
_NESTED = re.compile(r"[\[{(]\s*[\[{\"']|\[.*[,，、].*\]|\[[\d.]+\s")
"""Objects, tuples, and lists that are not written as JSON, as NumPy's; `[laughs]` is a name."""
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


def distinct_cells(table: Table, column: str, most: int = _MAX_DISTINCT) -> list[Any]:
    """The distinct cells of a column that are not missing; of the first rows, if they are more than
    `most`."""
    distinct: dict[str, Any] = {}
    for _, cells in read_cells(table, (column,)):
        distinct |= zip(map(repr, cells), cells, strict=True)  # lists have no hash
        if len(distinct) > most:
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
    """Missing, white space, or an empty list."""
    return is_missing(cell) or str(cell).strip() in ("", "[]")


def class_name(cell: Any) -> str:
    """The text of a cell; `2.0`, which a reader or a spreadsheet makes of `2`, becomes `2`. Raises
    ValueError for objects and lists."""
    if is_missing(cell):
        return ""
    text = str(cell).strip()
    if isinstance(cell, dict | list) or _NESTED.match(text):
        raise ValueError(f"holds {text[:60]}, no class: make a column of the label")
    return text.split(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text


def finite_number(cell: Any, remedy: str) -> float:
    """Raises ValueError."""
    if is_blank(cell):
        raise ValueError(NO_LABEL)
    number = to_float(cell)
    largest = float(np.finfo(np.float32).max)
    if number is None or not abs(number) <= largest:
        fault = f"the label {cell!r} is not a number in the range of float32"
        raise ValueError(f"{fault}: {remedy}")
    return number


def parse_list(cell: Any) -> list[Any] | None:
    """The items of a list, or of one in a text, `["a", "b"]` or `['a', 'b']`; of a blank cell none.
    None for other cells."""
    if is_blank(cell):
        return []
    if isinstance(cell, list):
        return cell
    text = str(cell).strip()
    if text.startswith("["):
        for written in (text, text.replace("'", '"')):
            with contextlib.suppress(ValueError):
                return list(json.loads(written))
    return None


def class_names(cell: Any, separator: str | None) -> list[str]:
    """The labels of a cell of several; of a blank one none. Raises ValueError."""
    names = parse_list(cell)
    if separator:
        joined = [cell] if names is None else names
        parts = [part for name in joined for part in class_name(name).split(separator)]
        names = [part for part in parts if part.strip()]
    if names is None:
        raise ValueError(
            f'holds {str(cell)[:60]!r}, no list of labels: write JSON, ["a", "b"], or '
            "train with --label_separator"
        )
    return [class_name(name) for name in names]


def only_class(cell: Any) -> str:
    """The label of a cell of one; of a blank one "". Raises ValueError for several."""
    names = parse_list(cell)
    if names is None:
        return class_name(cell)
    if len(names) > 1:
        raise ValueError(
            f"holds {str(cell)[:60]}, several labels: train with --problem_type "
            "multi_label_classification"
        )
    return class_name(names[0]) if names else ""
