"""Label columns -> class ids, multi-hot rows or numbers, with names in a natural order."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
from natsort import natsorted

from toolkit.config import ProblemType
from toolkit.data.read import read_class_names
from toolkit.data.table import Table
from toolkit.data.targets import Targets
from toolkit.errors import UserError, did_you_mean, listing

USUAL = ("label", "labels", "sentiment", "emotion", "category", "class", "target", "intent", "topic", "score",
         "tags", "rating", "标签", "类别", "情感", "分类", "评分", "标注")  # fmt: skip
MULTI: ProblemType = "multi_label_classification"
_MAX_CLASSES, _FEW_CLASSES = 2000, 50
_MAX_DISTINCT = 200_000
"""Distinct values of a column that are read to infer its type: more are not classes, and would take much memory."""
_FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
_NO_LABEL = "no label: fill it or remove the row (a training run leaves out empty cells with --drop_empty_text)"
_ITEM = re.compile(
    r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\w.+-]+)(\s+(?=['\"\w.+-]))?", re.DOTALL
)
_SEPARATORS = r"[|｜,，;；、]"

_USUAL_METRICS = {
    "single_label_classification": "f1_macro",
    "multi_label_classification": "f1_micro",
    "regression": "loss",
}


@dataclass(frozen=True)
class Labels(Targets):
    """The classes, or the numbers, that a model predicts."""

    problem_type: ProblemType
    names: tuple[str, ...]
    """Class names by id; for regression the columns, or `score_0, score_1` if one column holds lists."""
    columns: tuple[str, ...]
    """Columns of the table: one, or one for each output."""
    multi_hot: bool = False
    """Whether cells hold a 0 or 1 for every class (in a list, or in columns) instead of class names."""
    values: tuple[str, ...] = ()
    """The cell value of each class, if --label_names_file renames it."""

    column_setting = "label_column"
    usual_columns = USUAL

    @property
    def usual_metric(self) -> str:
        return _USUAL_METRICS[self.problem_type]

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        problem_type = getattr(settings.model, "problem_type", None)
        facts = {"label_column": settings.data.label_column, "problem_type": problem_type}
        if file := getattr(settings.data, "label_names_file", None):
            return facts | {"class_names": read_class_names(file)}
        return facts

    @classmethod
    def text_columns(cls, settings: Any, table: Table, text_column: str) -> dict[str, str]:
        """With --drop_empty_text, rows without a label are left out, too."""
        columns = table.find_columns(settings.data.label_column, USUAL, "label_column")
        can_drop = (
            settings.data.drop_empty_text and getattr(settings.model, "problem_type", None) != MULTI
        )
        return (
            {"label_column": columns[0]}
            if can_drop and len(columns) == 1 and _has_cells(table, columns[0])
            else {}
        )

    @classmethod
    def find(cls, settings: Any, table: Table, text_column: str, rows: np.ndarray) -> Labels:
        facts = cls.data_facts(settings)
        names = facts.get("class_names")
        return find_labels(
            table, facts["label_column"], facts["problem_type"], text_column, rows, names
        )

    @property
    def size(self) -> int:
        """The number of model outputs."""
        return len(self.names)

    @cached_property
    def _ids(self) -> dict[str, int]:
        names = self.values or self.names
        ids = {_name(name): index for index, name in enumerate(names)} | {
            name: i for i, name in enumerate(names)
        }
        unnamed = list(names) == [
            f"LABEL_{index}" for index in ids.values()
        ]  # transformers' default: the file has ids
        return ids | {str(index): index for index in ids.values()} if unnamed else ids

    def in_columns(self, table: Table, columns: tuple[str, ...]) -> Labels:
        """These labels in another table: in one column, which for several labels holds names or a 0 or 1 per class, or
        in a column for each class or output, of its name. Raises UserError for columns of other names."""
        if len(columns) > 1:
            if set(columns) != set(self.names):
                raise UserError(
                    f"{table.name}: the label columns {listing(columns)} are not the model's classes or outputs "
                    f"{listing(self.names)}: rename them"
                )
            return replace(self, columns=self.names, multi_hot=self.problem_type == MULTI)
        names, flags = set[str](), False
        if self.problem_type == MULTI:
            names, flags = _names_in_lists(table, columns[0], np.arange(len(table)))
        return replace(self, columns=columns, multi_hot=flags and len(names) == self.size)

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """Those rows of a table -> (n,) int64 class ids, (n, outputs) float32, or (n,) float32. Raises UserError naming
        a row whose label is missing or does not occur in training."""
        if self.problem_type == "single_label_classification":
            read: Callable[..., list[Any]] = partial(self._class_ids, {}, table)
            dtype: Any = np.int64
        else:
            one = self._numbers if self.problem_type == "regression" else self._flags
            read, dtype = (
                lambda cells, numbers: list(map(one, cells, map(table.where, numbers.tolist()))),
                np.float32,
            )
        parts = [
            np.array(read(cells, numbers), dtype)
            for numbers, cells in _cells(table, self.columns, rows)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    def _class_ids(
        self, ids: dict[Any, int], table: Table, cells: list[Any], rows: np.ndarray
    ) -> list[int]:
        """`ids`: a cache, cell -> class id, so that each distinct cell is looked up once."""
        keys = cells if cells and isinstance(cells[0], str) else list(map(repr, cells))
        if not ids.keys() >= set(keys):
            for key, cell, row in zip(keys, cells, rows.tolist(), strict=True):
                if key not in ids:
                    ids[key] = self._id(cell, table.where(row))
        return [ids[key] for key in keys]

    def all_missing(self, table: Table) -> bool:
        if not set(self.columns) <= set(table.rows.column_names):
            return False
        blocks = (cells for column in self.columns for _, cells in _cells(table, (column,), None))
        return all(
            _is_missing(value) or not str(value).strip() for cells in blocks for value in cells
        )

    def _id(self, value: Any, where: str) -> int:
        name = "" if _is_missing(value) else str(value) if str(value) in self._ids else _name(value)
        if name in self._ids:
            return self._ids[name]
        if not name:
            raise UserError(f"{where}: {_NO_LABEL}")
        raise UserError(
            f"{where}: label {name!r} does not occur in training{did_you_mean(name, self._ids)}: "
            f"the classes are {listing(self._ids)}"
        )

    def _flags(self, value: Any, where: str) -> list[float]:
        """A cell of a multi-label column, or the cells of several columns -> a 0 or 1 per class."""
        if _is_missing(value):
            raise UserError(f"{where}: {_NO_LABEL}")
        items = _list_of(value, where)
        if not self.multi_hot:
            ids = {self._id(name, where) for name in items}
            return [float(place in ids) for place in range(self.size)]
        flags = [_FLAGS.get(str(item).strip().lower(), math.nan) for item in items]
        odd = next((place for place, flag in enumerate(flags) if math.isnan(flag)), None)
        if len(self.columns) > 1 and odd is not None:
            raise UserError(
                f"{where}: column {self.columns[odd]!r} is {items[odd]!r}; several label columns must each hold 0 or "
                "1, or numbers to predict: then pass --problem_type regression"
            )
        if len(flags) != self.size or odd is not None:
            raise UserError(
                f"{where}: {value!r} must hold a 0 or 1 for each of {self.size} classes"
            )
        return flags

    def _numbers(self, value: Any, where: str) -> float | list[float]:
        """A cell of numbers to predict: a number, or a list of them."""
        items = _parsed_list(value)
        if self.size == 1:
            return _number(items[0] if items and len(items) == 1 else value, where)
        if items is None or len(items) != self.size:
            raise UserError(
                f"{where}: {value!r} must hold {self.size} numbers: {listing(self.names)}"
            )
        return [
            _number(item, f"{where}, {name}") for item, name in zip(items, self.names, strict=True)
        ]

    def strata(self, encoded: np.ndarray) -> np.ndarray | None:
        return encoded if self.problem_type == "single_label_classification" else None

    def facts(self) -> dict[str, Any]:
        return {"labels": list(self.names), "problem_type": self.problem_type}

    def source(self) -> dict[str, Any]:
        return {"label_columns": list(self.columns), "label_values": list(self.values)}

    def describe(self) -> str:
        kind, names = (
            self.problem_type.replace("_", " "),
            ", ".join(self.names[:8]) + "..." * (self.size > 8),
        )
        what = "classes" if kind != "regression" else "outputs" if self.size > 1 else "output"
        lists = (
            f" (each list in {self.columns[0]!r} read as a 0 or 1 per class, not as class numbers)"
        )
        return f"{kind}, {self.size} {what}: {names}" + lists * (
            self.multi_hot and len(self.columns) == 1
        )


def find_labels(
    table: Table,
    label_column: str | None,
    problem_type: ProblemType | None,
    text_column: str,
    rows: np.ndarray | None = None,
    class_names: Mapping[str, str] | None = None,
) -> Labels:
    """Infers from the label column of `rows` (default: all) of the training table what a model predicts.

    Strings and integers are classes, numbers with a fraction are regression; lists, or several columns, are regression
    with several outputs if they hold numbers with fractions, and multi-label if they hold names or 0/1.
    `problem_type` overrides. `class_names`: cell value -> class name. Raises UserError when the column is missing or
    ambiguous, a label is empty, or there are fewer than two classes.
    """
    rows = np.arange(len(table)) if rows is None else rows
    columns = table.find_columns(label_column, USUAL, "label_column")
    if not columns:
        others = [
            name for name in table.rows.column_names if name not in table.columns_of(text_column)
        ]
        several = (
            f" (or several, each with 0 or 1 or a number: --label_column {','.join(others[:3])})"
        )
        raise table.ambiguous_column(
            "label", "label_column", others, several if len(others) > 1 else ""
        )
    values = [
        value for _, value in itertools.islice(_distinct(table, columns, rows), _MAX_DISTINCT)
    ]
    no_classes = UserError(
        "--label_names_file names classes that are numbers in one column: leave it out"
    )
    if len(columns) > 1:
        if class_names:
            raise no_classes
        numbers = [[to_float(item) for item in items] for items in values]
        problem = problem_type or ("regression" if _are_measures(numbers) else MULTI)
        if problem == "single_label_classification":
            raise UserError(
                f"several label columns mean several labels or numbers, not --problem_type {problem}"
            )
        return Labels(problem, columns, columns, multi_hot=problem == MULTI)
    column = columns[0]
    problem = problem_type or _guess(values, f"{table.name}: column {column!r}")
    if len(values) == _MAX_DISTINCT or any(_is_blank(value, problem) for value in values):
        _refuse_empty(table, column, rows, problem)
    if problem == "regression":
        if class_names:
            raise no_classes
        width = len(_parsed_list(values[0]) or [0])
        return Labels(
            problem,
            tuple(f"{column}_{place}" for place in range(width)) if width > 1 else columns,
            columns,
        )
    feature, multi_hot = _class_feature(table, column), False
    if class_names and feature is not None:
        raise no_classes
    if problem == MULTI:
        classes, multi_hot = _names_in_lists(table, column, rows)
        multi_hot = multi_hot and feature is None
    else:
        classes = set(map(_name, values))
    names, cell_values = natural_order(classes), tuple[str, ...]()
    # nearly as many values as rows are names, numbers or texts, not classes
    most_classes = (
        _MAX_CLASSES if problem_type else min(_MAX_CLASSES, max(_FEW_CLASSES, len(rows) / 2))
    )
    if feature is not None:
        names = tuple(feature.names)
    elif class_names:
        names, cell_values = _names_from_file(table, column, class_names, classes, multi_hot)
    elif not multi_hot and len(names) > most_classes:
        raise UserError(
            f"{table.name}: column {column!r} holds {len(names)} different values in {len(rows)} rows: is it the "
            "label? Name another with --label_column, or pass --problem_type (regression, "
            "single_label_classification or multi_label_classification)"
        )
    same = multi_hot and len(values) == 1  # as class numbers, too
    if len(names) < 2 or same:
        content = (
            f"{values[0]} in each row"
            if same
            else f"one class only ({names[0]})"
            if names
            else "no class at all"
        )
        raise UserError(
            f"{table.name}: column {column!r} holds {content}: at least two are needed (--label_column)"
        )
    return Labels(problem, names, columns, multi_hot, cell_values)


def _names_in_lists(table: Table, column: str, rows: np.ndarray) -> tuple[set[str], bool]:
    """(the names in the lists of a column, False); if each list has a 0 or 1 per class, (the indices, True)."""
    names, widths, flags = set[str](), set[int](), True
    for row, value in _distinct(table, (column,), rows):
        items = _list_of(value, table.where(row))
        names.update(
            filter(None, map(_name, items))
        )  # an empty one is no class: `encode` names its row
        widths.add(len(items))
        flags = flags and {str(item).strip().lower() for item in items} <= _FLAGS.keys()
    multi_hot = flags and len(widths) == 1 and max(widths) > 1
    return ({str(place) for place in range(max(widths))} if multi_hot else names), multi_hot


def _names_from_file(
    table: Table, column: str, class_names: Mapping[str, str], classes: set[str], multi_hot: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(class names, cell values) from --label_names_file. Raises UserError for a class without a name."""
    names, values = tuple(class_names.values()), () if multi_hot else tuple(class_names)
    unnamed = natural_order(classes - set(class_names)) if values else ()
    if unnamed or (multi_hot and len(names) != len(classes)):
        content = listing(unnamed) or f"rows of {len(classes)} classes"
        raise UserError(
            f"{table.name}: column {column!r} holds {content}, and --label_names_file names {listing(class_names)}: "
            "name all of them there, or leave it out"
        )
    return names, values


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """`10, 9, -1` -> `-1, 9, 10`; `class 10, class 2` -> `class 2, class 10`."""
    each = sorted(
        names
    )  # names that sort alike, `a1` and `a01`: a set's order differs from process to process
    return tuple(
        sorted(each, key=int)
        if all(re.fullmatch(r"-?\d+", name) for name in each)
        else natsorted(each)
    )


# --- cells ---


def _cells(
    table: Table, columns: Sequence[str], rows: np.ndarray | None
) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """Batches of (row numbers, cells): lists of cells for several columns; `ClassLabel` ids as names."""
    for numbers, values in table.cells(columns, rows):
        if len(columns) > 1:
            yield numbers, [list(items) for items in zip(*values, strict=True)]
        elif (feature := _class_feature(table, columns[0])) is None:
            yield numbers, values[0]
        else:
            yield numbers, [_label_names(value, feature.int2str) for value in values[0]]


def _distinct(table: Table, columns: Sequence[str], rows: np.ndarray) -> Iterator[tuple[int, Any]]:
    """(the first row, the cell) of each distinct cell; with more than _MAX_DISTINCT, some occur repeatedly."""
    seen: set[Any] = set()
    for numbers, cells in _cells(table, columns, rows):
        keys = cells if cells and isinstance(cells[0], str) else list(map(repr, cells))
        if seen.issuperset(keys):
            continue
        for number, key, value in zip(numbers.tolist(), keys, cells, strict=True):
            if key not in seen:
                if len(seen) < _MAX_DISTINCT:
                    seen.add(key)
                yield number, value


def _label_names(value: Any, to_name: Callable[[int], str]) -> Any:
    if isinstance(value, list):
        return [_label_names(item, to_name) for item in value]
    return (
        None if value is None or value < 0 else to_name(int(value))
    )  # -1: an unlabelled row of a hub data set


def _class_feature(table: Table, column: str) -> Any:
    """The `ClassLabel` feature of a column or of its lists' items, or None."""
    from datasets import ClassLabel

    feature = table.rows.features[column]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, ClassLabel) else None


def _guess(cells: Sequence[Any], where: str) -> ProblemType:
    """The problem type that fits the cells of a column. Raises UserError if they are ambiguous."""
    values = [value for value in cells if not _is_missing(value) and value != ""]
    lists = [_parsed_list(value) for value in values]
    if values and None not in lists:
        return _guess_of_lists(cast(list[list[Any]], lists), where)
    numbers = [number for value in values if (number := to_float(value)) is not None]
    fractions = any(number % 1 for number in numbers if math.isfinite(number))
    if len(numbers) == len(values):
        return "regression" if fractions else "single_label_classification"
    parts = [
        [to_float(part) for part in re.split(rf"{_SEPARATORS}|\s+", str(value).strip())]
        for value in values
    ]
    if all(None not in items for items in parts):
        several = next(value for value, items in zip(values, parts, strict=True) if len(items) > 1)
        raise UserError(
            f"{where} holds {several!r}: write 1.5, [1.5, 2.5] or several columns (--label_column a,b) if these are "
            f"numbers to predict, or pass --problem_type single_label_classification, or {MULTI} for lists"
        )
    # where most are numbers, `encode` names the row of one that is not
    return (
        "regression"
        if fractions and 2 * len(numbers) > len(values)
        else "single_label_classification"
    )


def _guess_of_lists(lists: Sequence[list[Any]], where: str) -> ProblemType:
    """Whether lists hold numbers to predict, or names, class ids or 0/1 per class."""
    items = [item for items in lists for item in items]
    fractions = any(isinstance(item, float) and item % 1 for item in items)
    numbers = all(isinstance(item, int | float) for item in items)
    even = len(set(map(len, lists))) == 1
    if even and numbers and _are_measures(lists):
        return "regression"
    if fractions or (even and numbers and len(lists[0]) > 1 and not set(items) <= {0, 1}):
        raise UserError(
            f"{where} holds {str(lists[0])[:40]}: pass --problem_type regression if these are numbers to predict, "
            f"as many in each row, or --problem_type {MULTI} if they are classes"
        )
    return MULTI


def _are_measures(lists: Sequence[Sequence[float | None]]) -> bool:
    """Whether rows of numbers must be regression: some have a fraction, and no column has only 0 and 1."""
    items = [math.nan if item is None else item for row in lists for item in row]
    measured = all(map(math.isfinite, items)) and any(item % 1 for item in items)
    return measured and all(set(column) - {0, 1} for column in zip(*lists, strict=True))


def to_float(value: Any) -> float | None:
    try:
        return None if "_" in str(value) else float(value)  # Python reads 1_5 as 15
    except (TypeError, ValueError):
        return None


def _is_blank(value: Any, problem: ProblemType) -> bool:
    """Whether a label is missing. In multi-label data an empty string is a row without classes instead."""
    return _is_missing(value) or (problem != MULTI and not str(value).strip())


def _refuse_empty(table: Table, column: str, rows: np.ndarray, problem: ProblemType) -> None:
    blank = [
        row
        for numbers, cells in _cells(table, (column,), rows)
        for row, value in zip(numbers.tolist(), cells, strict=True)
        if _is_blank(value, problem)
    ]
    if blank:
        several = any(re.search(_SEPARATORS, str(cell)) for cell in table.rows[:100][column])
        other = (
            f", or pass --problem_type {MULTI} if a row may have several classes or none" * several
        )
        drop = ", or pass --drop_empty_text, which leaves them out" * _has_cells(table, column)
        rows_text = f"rows {table.listing(blank)}: fill or remove them{drop}{other}"
        raise UserError(f"{table.name}: no label in column {column!r} of {rows_text}")


def _has_cells(table: Table, column: str) -> bool:
    """Whether it holds neither lists, also as text, nor the ids of a `ClassLabel`, of which -1 is missing."""
    if (
        not hasattr(table.rows.features[column], "dtype")
        or _class_feature(table, column) is not None
    ):
        return False
    return all(_parsed_list(cell) is None for cell in table.rows[:100][column])


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _name(value: Any) -> str:
    """The text of a cell; `2.0`, which a reader or a spreadsheet makes of `2`, becomes `2`."""
    text = str(value).strip()
    return text.split(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text


def _number(value: Any, where: str) -> float:
    number = to_float(value)
    if number is None or not math.isfinite(number):
        raise UserError(
            f"{where}: the label {value!r} is not a number: correct it, or pass another --problem_type"
        )
    if abs(number) > float(np.finfo(np.float32).max):
        raise UserError(
            f"{where}: the label {value!r} exceeds the range of float32 (3.4e38): scale the labels"
        )
    return number


def _list_of(value: Any, where: str) -> list[Any]:
    """The labels of a cell: a list, a list as text, or names separated by | , or ; (empty string: none)."""
    items = _parsed_list(value)
    if items is not None:
        return items
    if isinstance(value, str) and value.strip().startswith("["):
        raise UserError(f"{where}: {value!r} cannot be read as a list of labels")
    return [part.strip() for part in re.split(_SEPARATORS, str(value)) if part.strip()]


def _parsed_list(value: Any) -> list[Any] | None:
    if isinstance(value, list):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    for parse in (json.loads, _python_list):
        try:
            parsed = parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return (
            parsed if isinstance(parsed, list) and ... not in parsed else None
        )  # of a shortened array
    return None


def _python_list(text: str) -> Any:
    """`['a', 'b']`, as pandas writes lists to CSV, or `['a' 'b']`, which Python would join, and `[1 0]`, as arrays."""
    return ast.literal_eval(_ITEM.sub(lambda item: item[1] + ", " * bool(item[2]), text))
