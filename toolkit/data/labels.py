"""Label columns -> class ids, multi-hot rows or numbers, with names in a natural order.

| a cell holds | the task |
|---|---|
| a string, a whole number, in all rows a list of one name | one class |
| a number; some have a fraction | regression |
| a list of names, also as JSON, `["a", "b"]`, or with --label_separator | several classes or none |
| in each of several columns 0 or 1; or a number | several classes; regression |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from natsort import natsorted

from toolkit.config import ProblemType
from toolkit.data.columns import USUAL_LABELS
from toolkit.data.label_cells import (
    NO_LABEL,
    class_feature,
    class_name,
    class_names,
    distinct_cells,
    finite_number,
    is_blank,
    is_missing,
    only_class,
    parse_list,
    read_cells,
    to_float,
)
from toolkit.data.label_notes import separator_hint
from toolkit.data.table import Table
from toolkit.data.targets import Targets
from toolkit.errors import UserError, did_you_mean, listing

SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
_USUAL_METRICS = {SINGLE: "f1_macro", MULTI: "f1_micro", REGRESSION: "loss"}
_FEW_CLASSES = 50


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
    usual_columns = USUAL_LABELS

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
        ids = {class_name(name): place for place, name in enumerate(self.names)}
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
        for rows, cells in read_cells(table, self.columns):
            values = []
            # distinct cells are few; by their text, as lists have no hash
            known: dict[str, Any] = {}
            for row, cell in zip(rows.tolist(), cells, strict=True):
                text = repr(cell)
                if text not in known:
                    try:
                        known[text] = self._value(cell)
                    except ValueError as error:
                        raise UserError(f"{table.where(row)}: {error}") from error
                values.append(known[text])
            parts.append(np.array(values, dtype))
        return np.concatenate(parts[1:] or parts)

    def _value(self, cell: Any) -> Any:
        """A class id, a 0 or 1 per class, a number, or numbers. Raises ValueError."""
        if len(self.columns) > 1:
            return self._numbers(cell)
        if self.problem_type == REGRESSION:
            return finite_number(cell, f"correct it (for classes: --problem_type {SINGLE})")
        if self.problem_type == SINGLE:
            return self._id(only_class(cell))
        if is_missing(cell):
            raise ValueError(
                "no labels: write [], or an empty text with --label_separator, for a row of none"
            )
        flags = [0.0] * self.size
        for name in class_names(cell, self.separator):
            place = self._id(name)
            if flags[place]:
                raise ValueError(
                    f"{cell!r} names a class twice: write it once (0 and 1 need a column per class)"
                )
            flags[place] = 1.0
        return flags

    def _numbers(self, cells: list[Any]) -> list[float]:
        """One number for each column. Raises ValueError."""
        remedy = "correct it, or name one --label_column, which may hold classes"
        numbers = [finite_number(cell, remedy) for cell in cells]
        if self.problem_type == MULTI and not set(numbers) <= {0, 1}:
            raise ValueError(
                f"{cells} in the label columns, which hold 0 or 1 each: correct it, or empty the "
                "cells of a row whose labels are unknown (for numbers to predict, train with "
                "--problem_type regression)"
            )
        return numbers

    def _id(self, name: str) -> int:
        """The id of a class by its name. Raises ValueError."""
        if not name:
            raise ValueError(NO_LABEL)
        if name not in self._ids:
            raise ValueError(
                f"label {name!r} does not occur in training{did_you_mean(name, self._ids)}: the "
                f"classes are {listing(self._ids)}"
            )
        return self._ids[name]

    def missing(self, table: Table) -> np.ndarray:
        """An empty cell of several labels is none of them, unless all cells are empty; of several
        columns, a row with an empty one."""
        if not set(table.rows.column_names).issuperset(self.columns):
            return np.ones(len(table), bool)
        flags = []
        for _, cells in read_cells(table, self.columns):
            if len(self.columns) > 1:
                flags += [any(map(is_blank, row)) for row in cells]
            else:
                flags += map(is_blank, cells)
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
        raise ValueError(
            f"have several labels or numbers: leave out --problem_type {SINGLE}"
        )
    numbers = {
        to_float(cell) for column in columns for cell in distinct_cells(table, column)
    }
    # a negative one beside 0 and 1 may mean that the label is unknown: `encode` names its row
    positive = {number for number in numbers if number is not None and number > 0}
    problem = MULTI if positive <= {1.0} else REGRESSION
    return Labels(problem_type or problem, columns, columns)


def _labels_of_column(
    table: Table, column: str, problem_type: ProblemType | None, separator: str | None
) -> Labels:
    """Raises ValueError for cells that are no labels."""
    cells = distinct_cells(table, column)
    problem = problem_type or _guess(cells, separator)
    if problem == REGRESSION:
        return Labels(problem, (column,), (column,))
    names = _names_in(cells, problem, separator)
    feature = class_feature(table, column)
    if feature:
        names = tuple(feature.names)
    is_guess = feature is None and problem_type is None
    if is_guess and len(names) > max(_FEW_CLASSES, len(table) / 2):
        doubt = separator_hint(names) or (
            "is it the label? Name another with --label_column; if these are the classes, pass "
            f"--problem_type {problem}"
        )
        count = f"{len(names)} different values, more than half as many as rows"
        raise ValueError(f"holds {count} ({len(table)}): {doubt}")
    if len(names) < 2:
        only = listing(names) or "no class"
        raise ValueError(
            f"holds {only} only: at least two classes are needed (--label_column)"
        )
    if problem == MULTI and len(cells) > 1:
        unnamed = [cell for cell in cells if set(names) - set(class_names(cell, separator))]
        if not unnamed:
            raise ValueError(
                f"names all of {listing(names)} in every row: 0 and 1 need a column per class"
            )
    return Labels(problem, names, (column,), separator)


def _names_in(
    cells: list[Any], problem: ProblemType, separator: str | None
) -> tuple[str, ...]:
    """The classes that distinct cells name, in natural order. Raises ValueError for objects and
    lists."""
    names: set[str] = set()
    for cell in cells:
        if problem == SINGLE:
            names.add(only_class(cell))
        else:
            names.update(class_names(cell, separator))
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
    if separator:
        return MULTI
    lists = [names for names in map(parse_list, distinct) if names is not None]
    if len(lists) == len(distinct):
        return SINGLE if all(len(names) == 1 for names in lists) else MULTI
    cells = [cell for cell in distinct if cell != ""]
    numbers = [number for cell in cells if (number := to_float(cell)) is not None]
    fractions = any(number % 1 for number in numbers if math.isfinite(number))
    # where most are numbers, `encode` names the row of one that is not
    return REGRESSION if fractions and 2 * len(numbers) > len(cells) else SINGLE
