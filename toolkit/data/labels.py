"""Label columns -> class ids, multi-hot rows or numbers, with names in a natural order."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from natsort import natsorted

from toolkit.config import ProblemType
from toolkit.data.read import Table, columns_of, find_column
from toolkit.data.rows import Targets
from toolkit.errors import UserError, did_you_mean, listing

USUAL = ("label", "labels", "sentiment", "emotion", "category", "class", "target", "intent", "topic", "score",
         "标签", "类别", "情感", "分类")  # fmt: skip
MULTI: ProblemType = "multi_label_classification"
MOST_CLASSES = 2000
_FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
_LARGEST = float(np.finfo(np.float32).max)
_SEPARATORS = r"[|,;，；]"


@dataclass(frozen=True)
class Labels(Targets):
    """What the labels of a task are."""

    problem_type: ProblemType
    names: tuple[str, ...]
    """Class names by id; one name, the column's, for regression."""
    columns: tuple[str, ...]
    """Where they stand: one column, or one 0/1 column per class."""
    multi_hot: bool = False
    """Each cell holds a 0 or 1 for every class instead of the names of its classes."""

    @property
    def size(self) -> int:
        """The number of outputs the model needs."""
        return len(self.names)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    def encode(self, table: Table, kept: np.ndarray) -> np.ndarray:
        """The rows `kept` of a table -> (n,) int64 class ids, (n, classes) float32, or (n,) float32.

        Raises UserError naming the row with a label unseen in training, or with none at all.
        """
        missing = [column for column in self.columns if column not in table.rows.column_names]
        if missing:
            known = listing(table.rows.column_names)
            raise UserError(f"{table.name} has no label column {missing[0]!r}: it has {known}")
        if len(self.columns) > 1:
            return np.array([_flags(table, name, kept) for name in self.columns], np.float32).T.copy()
        cells = [
            (value, _at(table, row)) for row, value in zip(kept, _cells(table, self.columns[0], kept), strict=True)
        ]
        if self.problem_type == "regression":
            return np.array([_number(value, where) for value, where in cells], np.float32)
        if self.problem_type == "single_label_classification":
            return np.array([self._id(value, where) for value, where in cells])
        return np.array([self._flags_of(value, where) for value, where in cells], np.float32)

    def all_missing(self, table: Table) -> bool:
        if any(column not in table.rows.column_names for column in self.columns):
            return False
        every = np.arange(len(table.rows))
        return all(_is_missing(value) for column in self.columns for value in _cells(table, column, every))

    def _id(self, value: Any, where: str) -> int:
        name = "" if _is_missing(value) else _name(value)
        if name in self._ids:
            return self._ids[name]
        if not name:
            raise UserError(f"{where}: no label: fill it or remove the row")
        raise UserError(
            f"{where}: label {name!r} does not occur in training{did_you_mean(name, self.names)}: "
            f"the classes are {listing(self.names)}"
        )

    def _flags_of(self, value: Any, where: str) -> list[float]:
        """One cell of a multi-label column -> a 0 or 1 per class."""
        if _is_missing(value):
            raise UserError(f"{where}: no label: fill it or remove the row")
        names = _list_of(value, where)
        if self.multi_hot:
            if len(names) != self.size or any(item not in (0, 1) for item in names):
                raise UserError(f"{where}: {value!r} must hold a 0 or 1 for each of {self.size} classes")
            return [float(item) for item in names]
        ids = {self._id(name, where) for name in names}
        return [float(place in ids) for place in range(self.size)]

    def strata(self, encoded: np.ndarray) -> np.ndarray | None:
        return encoded if self.problem_type == "single_label_classification" else None

    def facts(self) -> dict[str, Any]:
        return {"labels": list(self.names), "problem_type": self.problem_type}

    def describe(self) -> str:
        return f"{len(self.names)} outputs: {', '.join(self.names[:8])}{'...' if len(self.names) > 8 else ''}"


def find_labels(
    table: Table,
    label_column: str | None,
    problem_type: ProblemType | None,
    text_column: str,
    kept: np.ndarray | None = None,
) -> Labels:
    """Looks at the training table's label column and decides what it means.

    Strings and whole numbers are classes, numbers with a fraction are regression, lists and several
    0/1 columns are multi-label; `problem_type` overrides. Only the rows `kept` count (all by default).
    Raises UserError when there is no label column, an empty label, or fewer than two classes.
    """
    rows = np.arange(len(table.rows)) if kept is None else kept
    columns = tuple(name.strip() for name in label_column.split(",")) if label_column else ()
    if len(columns) > 1 and label_column not in table.rows.column_names:
        if problem_type not in (None, MULTI):
            raise UserError(f"several label columns mean multi-label classification, not --problem_type {problem_type}")
        for name in columns:
            find_column(table, name, (), "label_column")
            _flags(table, name, rows)
        return Labels(MULTI, columns, columns)
    column = find_column(table, label_column, USUAL, "label_column")
    if column is None:
        others = [name for name in table.rows.column_names if name not in columns_of(table, text_column)]
        several = f" (or several that hold 0 or 1: --label_column {','.join(others[:3])})" if len(others) > 1 else ""
        named = f"Name one of {listing(others)} with --label_column" if others else "There is no other than the text"
        raise UserError(f"{table.name}: which column is the label? {named}{several}")
    cells = _cells(table, column, rows)
    problem = problem_type or _guess(cells)
    _refuse_empty(table, column, rows, cells, problem)
    if problem == "regression":
        return Labels(problem, (column,), (column,))
    lists = [[value] for value in cells]
    if problem == MULTI:
        lists = [_list_of(value, _at(table, row)) for row, value in zip(rows, cells, strict=True)]
    feature = _class_feature(table, column)
    multi_hot = problem == MULTI and feature is None and _are_multi_hot(lists)
    if feature is not None:
        names = tuple(feature.names)
    elif multi_hot:
        names = tuple(str(place) for place in range(len(lists[0])))
    else:
        names = natural_order({_name(name) for found in lists for name in found})
    return Labels(problem, _checked(names, table, column), (column,), multi_hot)


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """`10, 9, -1` -> `-1, 9, 10`; `class 10, class 2` -> `class 2, class 10`."""
    found = list(names)
    if all(re.fullmatch(r"-?\d+", name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(natsorted(found))


def problem_of(value: str | None) -> ProblemType:
    """A model config's problem type; classification where it names none."""
    return cast(ProblemType, value or "single_label_classification")


def _checked(names: tuple[str, ...], table: Table, column: str) -> tuple[str, ...]:
    if len(names) < 2:
        held = f"one class only ({names[0]})" if names else "no class at all"
        raise UserError(f"{table.name}: column {column!r} holds {held}: at least two are needed")
    if len(names) > MOST_CLASSES:
        raise UserError(
            f"{table.name}: column {column!r} holds {len(names)} different values: is it the label? Name another "
            "with --label_column, or pass --problem_type regression"
        )
    return names


# --- cells ---


def _at(table: Table, row: Any) -> str:
    return f"{table.name}, row {row + 1}"


def _cells(table: Table, column: str, rows: np.ndarray) -> list[Any]:
    """The column's values at `rows`; a data set's own class numbers become their names."""
    values = table.rows.with_format(None)[column][:]
    chosen = [values[row] for row in rows.tolist()]
    feature = _class_feature(table, column)
    if feature is None:
        return chosen
    return [_translated(value, feature.int2str) for value in chosen]


def _translated(value: Any, to_name: Callable[[int], str]) -> Any:
    if isinstance(value, list):
        return [_translated(item, to_name) for item in value]
    return None if value is None or value < 0 else to_name(int(value))  # -1: a hub's unlabelled rows


def _class_feature(table: Table, column: str) -> Any:
    """The `ClassLabel` of a column, or of the items of its lists."""
    from datasets import ClassLabel

    feature = table.rows.features[column]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, ClassLabel) else None


def _guess(cells: Sequence[Any]) -> ProblemType:
    given = [value for value in cells if not _is_missing(value) and value != ""]
    if given and all(_parsed_list(value) is not None for value in given):
        return MULTI
    numbers = [_to_float(value) for value in given]
    if None not in numbers and any(number % 1 for number in numbers if number and math.isfinite(number)):
        return "regression"
    return "single_label_classification"


def _to_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _refuse_empty(table: Table, column: str, rows: np.ndarray, cells: Sequence[Any], problem: ProblemType) -> None:
    blank_is_none = problem == MULTI  # there an empty cell is a row without any class
    blank = [_is_missing(value) or (not blank_is_none and not str(value).strip()) for value in cells]
    if any(blank):
        empty = listing(rows[blank] + 1)
        raise UserError(f"{table.name}: no label in column {column!r} of rows {empty}: fill or remove them")


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _name(value: Any) -> str:
    """`2.0`, which a reader or a spreadsheet made of `2`, is `2`; everything else is as written."""
    text = str(value).strip()
    return text.split(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text


def _number(value: Any, where: str) -> float:
    number = _to_float(value)
    if number is None or not math.isfinite(number):
        raise UserError(f"{where}: the label {value!r} is not a number")
    if abs(number) > _LARGEST:
        raise UserError(f"{where}: the label {value!r} is more than a model's numbers hold (3.4e38): scale the labels")
    return number


def _flags(table: Table, column: str, rows: np.ndarray) -> list[float]:
    """A 0/1 column at `rows`. Raises UserError naming the first row that holds something else."""
    values = table.rows.with_format(None)[column][:]
    flags = []
    for row in rows.tolist():
        flag = _FLAGS.get(str(values[row]).strip().lower())
        if flag is None:
            raise UserError(
                f"{_at(table, row)}: column {column!r} is {values[row]!r}; several label columns must each hold 0 or 1"
            )
        flags.append(flag)
    return flags


def _list_of(value: Any, where: str) -> list[Any]:
    """One cell's labels: a list, a list written as text, or names separated by | , or ; (empty: none)."""
    found = _parsed_list(value)
    if found is not None:
        return found
    if isinstance(value, str) and value.strip().startswith("["):
        raise UserError(f"{where}: {value!r} cannot be read as a list of labels")
    return [part.strip() for part in re.split(_SEPARATORS, str(value)) if part.strip()]


def _parsed_list(value: Any) -> list[Any] | None:
    if isinstance(value, list):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    for parse in (json.loads, ast.literal_eval):  # `["a"]` and, as pandas writes lists, `['a']`
        try:
            parsed = parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return parsed if isinstance(parsed, list) else None
    return None


def _are_multi_hot(lists: Sequence[list[Any]]) -> bool:
    lengths = {len(items) for items in lists}
    return len(lengths) == 1 and lengths.pop() > 1 and all(item in (0, 1) for items in lists for item in items)
