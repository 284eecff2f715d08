"""toolkit/data/labels.py: label columns -> class ids, multi-hot rows or numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import numpy as np
import pytest

from toolkit.config import ProblemType
from toolkit.data.labels import Labels, find_labels
from toolkit.data.read import Table
from toolkit.errors import UserError

MULTI: ProblemType = "multi_label_classification"


def table_of(labels: Sequence[Any], feature: Any = None, name: str = "f.csv", column: str = "label") -> Table:
    features = datasets.Features({"text": datasets.Value("string"), column: feature}) if feature else None
    columns = {"text": ["t"] * len(labels), column: list(labels)}
    return Table(datasets.Dataset.from_dict(columns, features=features), name, "d")


def found(labels: Sequence[Any], problem: ProblemType | None = None, feature: Any = None) -> Labels:
    return find_labels(table_of(labels, feature), None, problem, "text")


def encoded(labels: Labels, values: Sequence[Any], feature: Any = None, name: str = "f.csv") -> list[Any]:
    return labels.encode(table_of(values, feature, name), np.arange(len(values))).tolist()


def fault_of(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("labels", "names", "ids"),
    [
        (["neg", "pos", "neg"], ("neg", "pos"), [0, 1, 0]),
        (["差", "好"], ("好", "差"), [1, 0]),
        ([1, 0, 1], ("0", "1"), [1, 0, 1]),
        ([-1, 1, 0], ("-1", "0", "1"), [0, 2, 1]),
        ([100, 7, 9], ("7", "9", "100"), [2, 0, 1]),
        ([1.0, 3.0, 1.0], ("1", "3"), [0, 1, 0]),  # whole numbers that a reader widened
        ([True, False], ("False", "True"), [1, 0]),
        (["None", "a"], ("None", "a"), [0, 1]),
        ([" a", "b "], ("a", "b"), [0, 1]),
        (["class 10", "class 2"], ("class 2", "class 10"), [1, 0]),
    ],
)
def test_classes(labels: list[Any], names: tuple[str, ...], ids: list[int]) -> None:
    decided = found(labels)
    assert decided.problem_type == "single_label_classification"
    assert (decided.names, encoded(decided, labels)) == (names, ids)
    assert decided.encode(table_of(labels), np.arange(len(labels))).dtype == np.int64


def test_a_data_sets_own_names_keep_their_order() -> None:
    feature = datasets.ClassLabel(names=["joy", "anger", "unused"])
    decided = found([0, 1], feature=feature)
    assert decided.names == ("joy", "anger", "unused")
    assert encoded(decided, [1, 0], feature) == [1, 0]
    assert encoded(decided, ["anger"]) == [1]  # from a file


@pytest.mark.parametrize(
    ("training", "other"),
    [([1, 2], [1.0, 2.0]), ([1, 2], ["1", "2"]), ([1.0, 2.0], [1, 2]), (["1", "2", "1"], [1, 2])],
)
def test_the_same_labels_in_another_type_are_the_same(training: list[Any], other: list[Any]) -> None:
    assert encoded(found(training), other) == [0, 1]


@pytest.mark.parametrize("labels", [[0.5, 1.0, -2.25], [3.1, 2.0, 7.0]])
def test_numbers_with_a_fraction_are_regression(labels: list[float]) -> None:
    decided = found(labels)
    assert (decided.problem_type, decided.names, decided.size) == ("regression", ("label",), 1)
    array = decided.encode(table_of(labels), np.array([0, 2]))
    assert array.dtype == np.float32
    assert array.tolist() == pytest.approx([labels[0], labels[2]])


@pytest.mark.parametrize("value", ["good", "", "inf", "nan", "1e39"])
def test_a_number_that_is_none_names_file_and_row(value: str) -> None:
    decided = found([1, 2, 3], "regression")
    assert "v.csv, row 2" in fault_of(lambda: encoded(decided, ["1", value, "2"], name="v.csv"))


MULTI_SHAPES = [
    ("names", [["b", "a"], ["b"], []]),
    ("json", ['["b", "a"]', '["b"]', "[]"]),
    ("bars", ["b|a", "b", ""]),
    ("commas", ["b, a", "b, ", " "]),
    ("chinese commas", ["b，a", "b", "[]"]),
    ("semicolons", ["b;a", "b", "[]"]),
    ("python", ["['b', 'a']", "['b']", "[]"]),  # as pandas writes lists to CSV
]


@pytest.mark.parametrize(("shape", "labels"), MULTI_SHAPES, ids=[shape for shape, _ in MULTI_SHAPES])
def test_multi_label_shapes_with_a_row_without_any(shape: str, labels: list[Any]) -> None:
    guessed = shape in ("names", "json", "python")
    decided = found(labels, None if guessed else MULTI)
    assert (decided.problem_type, decided.names) == (MULTI, ("a", "b"))
    assert encoded(decided, labels) == [[1, 1], [0, 1], [0, 0]]
    assert decided.encode(table_of(labels), np.arange(3)).dtype == np.float32


@pytest.mark.parametrize(
    "labels", [[[1, 0, 1], [0, 0, 1]], [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], ["[1, 0, 1]", "[0, 0, 1]"]]
)
def test_multi_hot_lists(labels: list[Any]) -> None:
    decided = found(labels)
    assert (decided.problem_type, decided.names) == (MULTI, ("0", "1", "2"))
    assert encoded(decided, labels) == [[1, 0, 1], [0, 0, 1]]


def test_a_multi_hot_list_of_another_length_is_an_error() -> None:
    decided = found([[1, 0, 1], [0, 1, 1]])
    assert "v.csv, row 2" in fault_of(lambda: encoded(decided, [[1, 0, 1], [1, 0, 1, 1]], name="v.csv"))


@pytest.mark.parametrize(
    ("labels", "rows"),
    [
        ([[0], [1], [0, 1]], [[1, 0], [0, 1], [1, 1]]),  # [0, 1] is two class numbers here, not a multi-hot row
        ([[3], [7, 3], [10]], [[1, 0, 0], [1, 1, 0], [0, 0, 1]]),
    ],
)
def test_lists_of_class_numbers(labels: list[Any], rows: list[list[int]]) -> None:
    assert encoded(found(labels), labels) == rows


def test_lists_of_a_data_sets_own_classes_keep_their_names() -> None:
    feature = datasets.List(datasets.ClassLabel(names=["joy", "anger", "fear"]))
    decided = found([[0], [0, 2]], feature=feature)
    assert decided.names == ("joy", "anger", "fear")
    assert encoded(decided, [[0], [0, 2]], feature) == [[1, 0, 0], [1, 0, 1]]


def columns_table(name: str = "f.csv", **columns: list[Any]) -> Table:
    return Table(datasets.Dataset.from_dict({"text": ["t", "u"], **columns}), name, "d")


@pytest.mark.parametrize("ones", [[1, 0], ["1", "0"], [1.0, 0.0], [True, False]])
def test_several_columns(ones: list[Any]) -> None:
    table = columns_table(toxic=ones, rude=[1, 1], other=[5, 5])
    decided = find_labels(table, "toxic, rude", None, "text")
    assert (decided.problem_type, decided.names) == (MULTI, ("toxic", "rude"))
    assert decided.encode(table, np.arange(2)).tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("odd", [2, 0.5, "yes", None])
@pytest.mark.parametrize("where", ["training", "validation"])
def test_several_columns_hold_nothing_but_0_and_1(odd: Any, where: str) -> None:
    good, bad = (
        columns_table(a=[1, 0], b=[0, 1]),
        columns_table("v.csv", a=[1, 0], b=[0 if odd in (2, 0.5) else "0", odd]),
    )

    def act() -> object:
        if where == "training":
            return find_labels(bad, "a,b", None, "text")
        return find_labels(good, "a,b", None, "text").encode(bad, np.arange(2))

    fault = fault_of(act)
    assert "v.csv, row 2" in fault
    assert "'b'" in fault


def test_several_columns_are_multi_label_and_nothing_else() -> None:
    table = columns_table(a=[1, 0], b=[0, 1])
    assert "regression" in fault_of(lambda: find_labels(table, "a,b", "regression", "text"))
    assert "did you mean b?" in fault_of(lambda: find_labels(table, "a,bb", None, "text"))


@pytest.mark.parametrize(
    ("labels", "problem"),
    [(["a", "a"], None), ([1, 1, 1], None), ([["a"], ["a"]], None), (["a", "a|a"], MULTI), ([[], []], None)],
)
def test_one_class_only_is_an_error(labels: list[Any], problem: ProblemType | None) -> None:
    assert "f.csv" in fault_of(lambda: found(labels, problem))


@pytest.mark.parametrize(
    ("labels", "rows"),
    [(["a", None, "b"], "2"), (["a", "", "b", ""], "2, 4"), ([1, None, 2], "2"), ([1.5, float("nan")], "2"),
     ([["a"], None, ["b"]], "2")],
)  # fmt: skip
def test_rows_without_a_label_are_named(labels: list[Any], rows: str) -> None:
    fault = fault_of(lambda: found(labels))
    assert f"rows {rows}:" in fault
    assert "f.csv" in fault


@pytest.mark.parametrize(
    ("training", "other"),
    [
        (["a", "b"], ["a", None]),
        (["a", "b"], ["a", ""]),
        (["a", "None"], ["a", None]),  # the class `None` is not the missing label
        ([1.0, 2.0], [1.0, float("nan")]),
        ([["a"], ["b"]], [["a"], None]),
        ([["a"], ["b"]], [["a"], ["b", None]]),
    ],
)
def test_rows_without_a_label_outside_training_name_file_and_row(training: list[Any], other: list[Any]) -> None:
    decided = found(training)
    assert "v.csv, row 2: no label" in fault_of(lambda: encoded(decided, other, name="v.csv"))


@pytest.mark.parametrize(
    ("training", "other", "unseen"),
    [
        (["good", "bad"], ["good", "god"], "'god'"),
        ([1, 2], [1, 3], "'3'"),
        ([1, 2], [1.0, 1.5], "'1.5'"),
        ([["a"], ["b"]], [["a"], ["b", "c"]], "'c'"),
    ],
)
def test_a_label_unseen_in_training_names_row_and_file(training: list[Any], other: list[Any], unseen: str) -> None:
    fault = fault_of(lambda: encoded(found(training), other, name="v.csv"))
    assert "v.csv, row 2" in fault
    assert unseen in fault
    assert found(training).names[0] in fault


def test_the_nearest_known_label_is_named() -> None:
    assert "did you mean good?" in fault_of(lambda: encoded(found(["good", "bad"]), ["god"]))


def test_rows_are_named_as_in_the_file_when_some_are_left_out() -> None:
    table = table_of(["a", "b", "c"], name="v.csv")
    assert "v.csv, row 3" in fault_of(lambda: found(["a", "b"]).encode(table, np.array([1, 2])))


def test_a_list_that_cannot_be_read_names_file_and_row() -> None:
    decided = found([["a"], ["b"]])
    assert "v.csv, row 2" in fault_of(lambda: encoded(decided, ['["a"]', '["b"'], name="v.csv"))


def test_a_missing_label_column_of_another_file() -> None:
    decided = found(["a", "b"])
    fault = fault_of(lambda: decided.encode(table_of(["a"], name="v.csv", column="lable"), np.arange(1)))
    assert "v.csv has no label column 'label'" in fault
    assert "lable" in fault


def test_a_label_column_that_cannot_be_told() -> None:
    fault = fault_of(lambda: find_labels(table_of(["a", "b"], column="y"), None, None, "text"))
    assert "--label_column" in fault
    assert "y" in fault
    assert "text" not in fault.split("Name one of")[1].split("with")[0]


def test_too_many_classes_are_no_label() -> None:
    fault = fault_of(lambda: found([f"text {number}" for number in range(2001)]))
    assert "2001 different values" in fault
    assert "--label_column" in fault
