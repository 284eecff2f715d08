"""Label columns -> class ids, multi-hot rows or numbers, with names in a natural order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from natsort import natsorted

from toolkit.config import ProblemType
from toolkit.data.read import Table, find_column
from toolkit.errors import UserError, did_you_mean, listing

USUAL = ("label", "labels", "sentiment", "emotion", "category", "class", "target", "intent", "topic", "score",
         "标签", "类别", "情感", "分类")  # fmt: skip
MOST_CLASSES = 2000


@dataclass(frozen=True)
class Labels:
    """What the labels of a task are."""

    problem_type: ProblemType
    names: tuple[str, ...]
    """Class names by id; one name, the column's, for regression."""
    columns: tuple[str, ...]
    """Where they stand: one column, or one 0/1 column per class."""

    @property
    def size(self) -> int:
        """The number of outputs the model needs."""
        return len(self.names)

    def encode(self, table: Table, kept: np.ndarray) -> np.ndarray:
        """The rows `kept` of a table -> (n,) int64 class ids, (n, classes) float32, or (n,) float32.

        Raises UserError naming the rows with a label unseen in training or none at all.
        """
        missing = [column for column in self.columns if column not in table.rows.column_names]
        if missing:
            raise UserError(
                f"{table.name} has no label column {missing[0]!r}: it has {listing(table.rows.column_names)}"
            )
        values = _values(table, self.columns)
        chosen = [values[row] for row in kept]
        if self.problem_type == "regression":
            return np.array(
                [_to_number(value, table, int(row)) for value, row in zip(chosen, kept, strict=True)],
                np.float32,
            )
        ids = {name: index for index, name in enumerate(self.names)}
        if self.problem_type == "single_label_classification":
            names = [_to_name(value) for value in chosen]
            _refuse_unknown(table, kept, [[name] for name in names], ids)
            return np.array([ids[name] for name in names], np.int64)
        if len(self.columns) > 1:
            return np.array(chosen, np.float32)
        sets = [_to_names(value, self.names) for value in chosen]
        _refuse_unknown(table, kept, sets, ids)
        hot = np.zeros((len(sets), len(ids)), np.float32)
        for row, found in enumerate(sets):
            hot[row, [ids[name] for name in found]] = 1.0
        return hot

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> Labels:
        return cls(loaded["problem_type"], tuple(loaded["names"]), tuple(loaded["columns"]))


def find_labels(table: Table, label_column: str | None, problem_type: ProblemType | None, text_column: str) -> Labels:
    """Looks at the training table's label column and decides what it means.

    Strings and whole numbers are classes, numbers with a fraction are regression, lists and several
    0/1 columns are multi-label; `problem_type` overrides. Raises UserError when there is no label
    column, an empty label, or fewer than two classes.
    """
    columns = tuple(name.strip() for name in label_column.split(",")) if label_column else ()
    if len(columns) > 1:
        return _multi_column(table, columns, problem_type)
    column = find_column(table, columns[0] if columns else None, USUAL, "label_column")
    if column is None:
        others = [name for name in table.rows.column_names if name != text_column]
        raise UserError(f"{table.name}: which column is the label? Name one of {listing(others)} with --label_column")
    values = _values(table, (column,))
    _refuse_empty(table, column, values)
    problem = problem_type or _guess(table, column, values)
    if problem == "regression":
        return Labels(problem, (column,), (column,))
    names = _class_names(table, column, values, problem)
    if len(names) < 2:
        raise UserError(f"{table.name}: column {column!r} holds one class only ({names[0]}): at least two are needed")
    if len(names) > MOST_CLASSES:
        raise UserError(
            f"{table.name}: column {column!r} holds {len(names)} different values: is it the label? Name another "
            "with --label_column, or pass --problem_type regression"
        )
    return Labels(problem, names, (column,))


def _multi_column(table: Table, columns: tuple[str, ...], problem_type: ProblemType | None) -> Labels:
    if problem_type not in (None, "multi_label_classification"):
        raise UserError(f"several label columns mean multi-label classification, not --problem_type {problem_type}")
    for column in columns:
        find_column(table, column, (), "label_column")
        odd = next((row for row, value in enumerate(table.rows[column]) if value not in (0, 1, "0", "1")), None)
        if odd is not None:
            raise UserError(
                f"{table.name}, row {odd + 1}: column {column!r} is {table.rows[odd][column]!r}; several label "
                "columns must each hold 0 or 1"
            )
    return Labels("multi_label_classification", columns, columns)


def _values(table: Table, columns: tuple[str, ...]) -> list[Any]:
    if len(columns) > 1:
        return [[float(value) for value in row] for row in zip(*(table.rows[name] for name in columns), strict=True)]
    feature = table.rows.features[columns[0]]
    values = list(table.rows[columns[0]])
    if _is_class_label(feature):
        return [None if value is None or value < 0 else feature.int2str(int(value)) for value in values]
    return values


def _is_class_label(feature: Any) -> bool:
    from datasets import ClassLabel

    return isinstance(feature, ClassLabel)


def _refuse_empty(table: Table, column: str, values: Sequence[Any]) -> None:
    empty = [row + 1 for row, value in enumerate(values) if value is None or value == "" or value != value]
    if empty:
        raise UserError(f"{table.name}: no label in column {column!r} of rows {listing(empty)}: fill or remove them")


def _guess(table: Table, column: str, values: Sequence[Any]) -> ProblemType:
    first = values[0]
    if isinstance(first, list) or (isinstance(first, str) and first.startswith("[") and first.endswith("]")):
        return "multi_label_classification"
    if isinstance(first, float) and any(value != int(value) for value in values):
        return "regression"
    return "single_label_classification"


def _class_names(table: Table, column: str, values: Sequence[Any], problem: ProblemType) -> tuple[str, ...]:
    feature = table.rows.features[column]
    if _is_class_label(feature):
        return tuple(feature.names)
    if problem == "single_label_classification":
        return natural_order({_to_name(value) for value in values})
    if _is_multi_hot(values):
        return tuple(str(place) for place in range(len(values[0])))
    return natural_order({name for value in values for name in _to_names(value, ())})


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """`10, 9, -1` -> `-1, 9, 10`; `class 10, class 2` -> `class 2, class 10`."""
    found = list(names)
    if all(re.fullmatch(r"-?\d+", name) for name in found):
        return tuple(sorted(found, key=int))
    return tuple(natsorted(found))


def _is_multi_hot(values: Sequence[Any]) -> bool:
    if not isinstance(values[0], list) or len(values[0]) < 2:
        return False
    return len({len(value) for value in values}) == 1 and all(item in (0, 1) for value in values for item in value)


def _to_name(value: Any) -> str:
    if isinstance(value, float) and value == int(value):
        return str(int(value))  # whole numbers that a reader widened to floats
    return str(value).strip()


def _to_names(value: Any, known: Sequence[str]) -> list[str]:
    """One row's labels: a list, a JSON list, or names separated by | , or ; (empty: none).

    A multi-hot row is a list of 0/1 as long as the known names `0`, `1`, ...
    """
    if isinstance(value, str):
        text = value.strip()
        value = json.loads(text) if text.startswith("[") else [part for part in re.split(r"[|,;，；]", text) if part]
    by_place = list(known) == [str(place) for place in range(len(known))]
    if known and by_place and len(value) == len(known) and all(item in (0, 1) for item in value):
        return [known[place] for place, item in enumerate(value) if item]
    return [_to_name(item) for item in value]


def _to_number(value: Any, table: Table, row: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise UserError(f"{table.name}, row {row + 1}: the label {value!r} is not a number")
    return number


def _refuse_unknown(table: Table, kept: np.ndarray, sets: Sequence[Sequence[str]], ids: dict[str, int]) -> None:
    for row, names in zip(kept, sets, strict=True):
        for name in names:
            if name in ids:
                continue
            if name in ("", "None", "nan"):
                raise UserError(f"{table.name}, row {int(row) + 1}: no label: fill it or remove the row")
            raise UserError(
                f"{table.name}, row {int(row) + 1}: label {name!r} does not occur in training"
                f"{did_you_mean(name, ids)}: the classes are {listing(ids)}"
            )


def problem_of(value: str | None) -> ProblemType:
    """A model config's problem type; classification where it names none."""
    return cast(ProblemType, value or "single_label_classification")
