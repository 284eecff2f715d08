"""Label columns -> class ids, multi-hot rows or numbers, with names in a natural order.

| a cell holds | the task |
|---|---|
| a string, a whole number | one class |
| a number; some have a fraction | regression |
| a list of names, also as JSON, `["a", "b"]`, or with --label_separator | several classes or none |
| in each of several columns 0 or 1; or a number | several classes; regression |
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from natsort import natsorted

from toolkit.config import ProblemType
from toolkit.data.table import Table
from toolkit.data.targets import Targets
from toolkit.errors import UserError, did_you_mean, listing

USUAL = ("label", "labels", "sentiment", "emotion", "category", "class", "target", "intent",
         "topic", "score", "tags", "rating", "标签", "类别", "情感", "分类", "评分", "标注")  # fmt: skip
SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
_USUAL_METRICS = {SINGLE: "f1_macro", MULTI: "f1_micro", REGRESSION: "loss"}
_NO_LABEL = "no label: fill it or remove the row, or pass --drop_empty_text, which leaves it out"
_FEW_CLASSES = 50
_MAX_DISTINCT = 200_000
"""Distinct values that are read to infer a column's type: more are numbers, or no labels."""


@dataclass(frozen=True)
class Labels(Targets):
    """The classes, or the numbers, that a model predicts."""

    problem_type: ProblemType
    names: tuple[str, ...]
    """Class names by id; for regression the columns."""
    columns: tuple[str, ...]
    """Columns of the table: one, or one for each output."""
    separator: str | None = None
    """Between the names in a cell of several labels."""

    column_setting = "label_column"
    usual_columns = USUAL

    @property
    def usual_metric(self) -> str:
        return _USUAL_METRICS[self.problem_type]

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        data = settings.data
        return {
            "label_column": data.label_column,
            "label_separator": getattr(data, "label_separator", None),
            "problem_type": getattr(settings.model, "problem_type", None),
        }

    @classmethod
    def find(cls, settings: Any, table: Table, columns: tuple[str, ...]) -> Labels:
        facts = cls.data_facts(settings)
        return find_labels(table, columns, facts["problem_type"], facts["label_separator"])

    @property
    def size(self) -> int:
        """The number of model outputs."""
        return len(self.names)

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Cell -> class id."""
        ids = {_name(name): place for place, name in enumerate(self.names)}
        if list(self.names) == [f"LABEL_{place}" for place in range(self.size)]:
            # transformers' names for a model that was trained on ids
            ids |= {str(place): place for place in range(self.size)}
        return ids

    def in_columns(self, table: Table, columns: tuple[str, ...]) -> Labels:
        """These labels in another table: in one column, or in a column for each class or output, of
        its name. Raises UserError for columns of other names."""
        if len(columns) == 1:
            return replace(self, columns=columns)
        if set(columns) != set(self.names):
            raise UserError(
                f"{table.name}: the label columns {listing(columns)} are not the model's classes "
                f"or outputs {listing(self.names)}: rename them"
            )
        return replace(self, columns=self.names)

    def encode(self, table: Table) -> np.ndarray:
        """(n,) int64 class ids, (n, outputs) float32, or (n,) float32. Raises UserError naming a
        row whose label is missing or does not occur in training."""
        dtype: Any = np.int64 if self.problem_type == SINGLE else np.float32
        parts = [np.zeros(0, dtype)]
        for rows, cells in _cells(table, self.columns):
            keys = _keys(cells)
            values: dict[Any, Any] = {}
            for key, row, cell in zip(keys, rows.tolist(), cells, strict=True):
                if key not in values:  # each distinct cell of a batch is encoded once
                    try:
                        values[key] = self._value(cell)
                    except ValueError as error:
                        raise UserError(f"{table.where(row)}: {error}") from error
            parts.append(np.array([values[key] for key in keys], dtype))
        return np.concatenate(parts[1:] or parts)

    def _value(self, cell: Any) -> Any:
        """A class id, a 0 or 1 per class, a number, or numbers. Raises ValueError."""
        if len(self.columns) > 1:
            return self._numbers(cell)
        if self.problem_type == REGRESSION:
            return _number(cell)
        if self.problem_type == SINGLE:
            return self._id(cell)
        if _is_missing(cell):
            raise ValueError("no labels: write [] where there are none")
        flags = [0.0] * self.size
        for name in _names(cell, self.separator):
            place = self._id(name)
            if flags[place]:
                raise ValueError(f"{cell!r} names a class twice: a column per class holds 0 and 1")
            flags[place] = 1.0
        return flags

    def _numbers(self, cells: list[Any]) -> list[float]:
        numbers = [_number(cell) for cell in cells]
        if self.problem_type == MULTI and not set(numbers) <= {0, 1}:
            raise ValueError(
                f"{cells} in the label columns: several hold 0 or 1 each, or numbers to predict: "
                "then pass --problem_type regression"
            )
        return numbers

    def _id(self, cell: Any) -> int:
        name = _name(cell)
        if not name:
            raise ValueError(_NO_LABEL)
        if name not in self._ids:
            raise ValueError(
                f"label {name!r} does not occur in training{did_you_mean(name, self._ids)}: the "
                f"classes are {listing(self._ids)}"
            )
        return self._ids[name]

    def missing(self, table: Table) -> np.ndarray:
        """An empty cell of several labels is none of them, unless all cells are empty."""
        if not set(table.rows.column_names).issuperset(self.columns):
            return np.ones(len(table), bool)
        flags = []
        for _, cells in _cells(table, self.columns):
            if len(self.columns) > 1:
                flags += [all(map(_is_blank, row)) for row in cells]
            else:
                flags += map(_is_blank, cells)
        blank = np.array(flags, bool)
        if self.problem_type == MULTI and len(self.columns) == 1 and not blank.all():
            return np.zeros_like(blank)
        return blank

    def strata(self, encoded: np.ndarray) -> np.ndarray | None:
        return encoded if self.problem_type == SINGLE else None

    def facts(self) -> dict[str, Any]:
        return {"labels": list(self.names), "problem_type": self.problem_type}

    def source(self) -> dict[str, Any]:
        source: dict[str, Any] = {"label_columns": list(self.columns)}
        if self.separator:
            source["label_separator"] = self.separator
        return source

    def describe(self) -> str:
        what = "outputs" if self.problem_type == REGRESSION else "classes"
        kind = self.problem_type.replace("_", " ")
        where = f"from column {listing(self.columns)}"
        return f"{kind} {where}, {self.size} {what}: {listing(self.names)}"


def find_labels(
    table: Table,
    columns: tuple[str, ...],
    problem_type: ProblemType | None = None,
    separator: str | None = None,
) -> Labels:
    """Infers from the label columns of the training table what a model predicts; `problem_type`
    overrides. Raises UserError for fewer than two classes, or cells that are no labels."""
    try:
        if len(columns) > 1:
            return _labels_of_columns(table, columns, problem_type)
        return _labels_of_column(table, columns[0], problem_type, separator)
    except ValueError as error:
        where = listing(map(repr, columns))
        raise UserError(f"{table.name}: column {where} {error}") from error


def _labels_of_columns(
    table: Table, columns: tuple[str, ...], problem_type: ProblemType | None
) -> Labels:
    """Several labels if the columns hold 0 and 1, or anything but numbers; else numbers. Raises
    ValueError."""
    if problem_type == SINGLE:
        raise ValueError(f"have several labels or numbers: leave out --problem_type {SINGLE}")
    numbers = {to_float(cell) for column in columns for cell in _distinct(table, column)}
    problem = MULTI
    if not numbers <= {0.0, 1.0, None}:
        problem = REGRESSION
    return Labels(problem_type or problem, columns, columns)


def _labels_of_column(
    table: Table, column: str, problem_type: ProblemType | None, separator: str | None
) -> Labels:
    """Raises ValueError for cells that are no labels."""
    cells = _distinct(table, column)
    problem = problem_type or _guess(cells, separator)
    if problem == REGRESSION:
        return Labels(problem, (column,), (column,))
    names = _class_names(cells, problem, separator)
    feature = _feature(table, column)
    if feature:
        names = tuple(feature.names)
    is_guess = feature is None and problem_type is None
    if is_guess and len(names) > max(_FEW_CLASSES, len(table) / 2):
        raise ValueError(
            f"holds {len(names)} different values in {len(table)} rows: is it the label? Name "
            "another with --label_column, or pass --problem_type"
        )
    if len(names) < 2:
        only = listing(names) or "no class"
        raise ValueError(f"holds {only} only: at least two classes are needed (--label_column)")
    return Labels(problem, names, (column,), separator)


def _class_names(cells: list[Any], problem: ProblemType, separator: str | None) -> tuple[str, ...]:
    names: set[str] = set()
    for cell in cells:
        parts = [cell] if problem == SINGLE else _names(cell, separator)
        names.update(map(_name, parts))
    return natural_order(names - {""})


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """`10, 9, -1` -> `-1, 9, 10`; `class 10, class 2` -> `class 2, class 10`. Names that sort
    alike, `a1` and `a01`, have one order, too."""
    ordered = sorted(names)
    if all(re.fullmatch(r"-?\d+", name) for name in ordered):
        return tuple(sorted(ordered, key=int))
    return tuple(natsorted(ordered))


def _guess(distinct: list[Any], separator: str | None) -> ProblemType:
    """The problem type that fits the cells of a column."""
    cells = [cell for cell in distinct if cell != ""]
    if separator or (cells and all(map(_is_list, cells))):
        return MULTI
    numbers = [number for cell in cells if (number := to_float(cell)) is not None]
    fractions = any(number % 1 for number in numbers if math.isfinite(number))
    # where most are numbers, `encode` names the row of one that is not
    return REGRESSION if fractions and 2 * len(numbers) > len(cells) else SINGLE


# --- cells


def _cells(table: Table, columns: Sequence[str]) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """Batches of (row numbers, cells): lists of cells for several columns; `ClassLabel` ids as
    names."""
    feature = _feature(table, columns[0])
    for numbers, values in table.cells(columns):
        if len(columns) > 1:
            yield numbers, list(map(list, zip(*values, strict=True)))
        elif feature:
            yield numbers, [_feature_names(cell, feature) for cell in values[0]]
        else:
            yield numbers, values[0]


def _keys(cells: list[Any]) -> list[str]:
    """Equal for equal cells; lists have no hash."""
    return [cell if isinstance(cell, str) else repr(cell) for cell in cells]


def _distinct(table: Table, column: str) -> list[Any]:
    """The distinct cells of a column that are not missing; of the first rows, if they are more than
    _MAX_DISTINCT."""
    distinct: dict[str, Any] = {}
    for _, cells in _cells(table, (column,)):
        distinct |= zip(_keys(cells), cells, strict=True)
        if len(distinct) > _MAX_DISTINCT:
            break
    return [cell for cell in distinct.values() if not _is_missing(cell)]


def _feature(table: Table, column: str) -> Any:
    """The `ClassLabel` feature of a column or of its lists' items, or None."""
    from datasets import ClassLabel

    if column not in table.rows.features:
        return None
    feature = table.rows.features[column]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, ClassLabel) else None


def _feature_names(cell: Any, feature: Any) -> Any:
    """Ids -> names; -1, an unlabelled row of a hub data set, -> None."""
    if isinstance(cell, list):
        return [_feature_names(item, feature) for item in cell]
    if cell is None or cell < 0:
        return None
    return feature.int2str(int(cell))


def to_float(value: Any) -> float | None:
    if "_" in str(value):  # Python reads 1_5 as 15
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_missing(cell: Any) -> bool:
    return cell is None or cell != cell


def _is_blank(cell: Any) -> bool:
    return _is_missing(cell) or not str(cell).strip()


def _name(cell: Any) -> str:
    """The text of a cell; `2.0`, which a reader or a spreadsheet makes of `2`, becomes `2`."""
    if _is_missing(cell):
        return ""
    text = str(cell).strip()
    return text.split(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text


def _number(cell: Any) -> float:
    """Raises ValueError."""
    if _is_blank(cell):
        raise ValueError(_NO_LABEL)
    number = to_float(cell)
    if number is None or not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(
            f"the label {cell!r} is not a number in the range of float32: correct it, or pass "
            "another --problem_type"
        )
    return number


def _is_list(cell: Any) -> bool:
    if isinstance(cell, str):
        text = cell.strip()
        return text.startswith("[") and text.endswith("]")
    return isinstance(cell, list)


def _names(cell: Any, separator: str | None) -> list[Any]:
    """The labels of a cell: a list, a list as JSON, or names with the separator between them; of an
    empty string none. Raises ValueError."""
    if isinstance(cell, list):
        return cell
    text = "" if _is_missing(cell) else str(cell).strip()
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
