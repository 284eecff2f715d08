"""toolkit/data/labels.py: label columns -> class ids, multi-hot rows or numbers."""

import itertools
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

from tests.faults import refusal
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, Labels, find_labels, natural_order
from toolkit.data.table import Table

NAMED = datasets.ClassLabel(names=["joy", "anger", "unused"])
AB = ("a", "b")
FLAGS = [[1, 1], [0, 1], [0, 0]]
TEXTS = [f"text {number}" for number in range(490)]
PAIRS = [",".join(pair) for pair in itertools.combinations("abcdefghijkl", 2)]


def table_of(labels: Sequence[Any], feature: Any = None, name: str = "f.csv") -> Table:
    features = None
    if feature:
        features = datasets.Features({"text": datasets.Value("string"), "label": feature})
    columns = {"text": ["t"] * len(labels), "label": list(labels)}
    return Table.of(datasets.Dataset.from_dict(columns, features=features), name, "d")


def columns_table(name: str = "f.csv", **columns: list[Any]) -> Table:
    return Table.of(datasets.Dataset.from_dict({"text": ["t", "u"], **columns}), name, "d")


def labels_of(labels: Sequence[Any], feature: Any = None, **settings: Any) -> Labels:
    return find_labels(table_of(labels, feature), ("label",), **settings)


def encoded(labels: Labels, values: Sequence[Any], feature: Any = None) -> Any:
    return labels.encode(table_of(values, feature, "v.csv")).tolist()


def test_what_cells_mean() -> None:
    for cells, settings, problem, names, targets in (
        (["neg", "pos", "neg"], {}, SINGLE, ("neg", "pos"), [0, 1, 0]),
        ([-1, 1, 0], {}, SINGLE, ("-1", "0", "1"), [0, 2, 1]),
        (["100", "7", "9"], {}, SINGLE, ("7", "9", "100"), [2, 0, 1]),
        ([1.0, 3.0, 1.0], {}, SINGLE, ("1", "3"), [0, 1, 0]),  # integers that a reader widened
        ([True, False], {}, SINGLE, ("False", "True"), [1, 0]),
        (["None", " a"], {}, SINGLE, ("None", "a"), [0, 1]),
        (["class 10", "class 2"], {}, SINGLE, ("class 2", "class 10"), [1, 0]),
        ([["b"], ["a"]], {}, SINGLE, AB, [1, 0]),
        (["['b']", "['a']"], {}, SINGLE, AB, [1, 0]),
        ([["b"], ["a"]], {"problem_type": MULTI}, MULTI, AB, [[0, 1], [1, 0]]),
        (["[b]", "[a]"], {}, SINGLE, ("[a]", "[b]"), [1, 0]),
        ([["b", "a"], ["b"], []], {}, MULTI, AB, FLAGS),
        (["['b', 'a']", "['b']", "[]"], {}, MULTI, AB, FLAGS),
        (['["b", "a"]', '["b"]', "[]"], {}, MULTI, AB, FLAGS),
        (["b|a", "b", ""], {"separator": "|"}, MULTI, AB, FLAGS),
        (["b、a", "b、", " "], {"separator": "、"}, MULTI, AB, FLAGS),
        ([[3], [7, 3], [10]], {}, MULTI, ("3", "7", "10"), [[1, 0, 0], [1, 1, 0], [0, 0, 1]]),
        ([0.5, 1.0, -2.25], {}, REGRESSION, ("label",), [0.5, 1.0, -2.25]),
        (["3", "2"], {"problem_type": REGRESSION}, REGRESSION, ("label",), [3.0, 2.0]),
        (["a|b", "a"], {}, SINGLE, ("a", "a|b"), [1, 0]),
    ):
        labels = labels_of(cells, **settings)
        assert (labels.problem_type, labels.names, encoded(labels, cells)) == (
            problem,
            names,
            targets,
        )
        assert labels.source().get("label_separator") == settings.get("separator")
        part = labels.encode(table_of(cells).select(np.array([0, len(cells) - 1])))
        assert part.dtype == (np.int64 if problem == SINGLE else np.float32)
        assert part.tolist() == [targets[0], targets[-1]]


def test_a_data_sets_own_names_keep_their_order() -> None:
    labels = labels_of([0, 1], NAMED)
    assert (labels.names, encoded(labels, [1, 0], NAMED)) == (("joy", "anger", "unused"), [1, 0])
    assert encoded(labels, ["anger"]) == [1]  # from a file
    lists = datasets.List(NAMED)
    labels = labels_of([[0], [0, 2]], lists)
    assert encoded(labels, [[0], [0, 2]], lists) == [[1, 0, 0], [1, 0, 1]]


def test_classes_that_sort_alike_have_one_order() -> None:
    """A set's order, which depends on the process, is not theirs."""
    for names in (["a1", "a01", "a2"], ["1", "01", "-1"]):
        assert len({natural_order(order) for order in itertools.permutations(names)}) == 1


def test_the_same_labels_in_another_type_are_the_same() -> None:
    """And so are class ids, for a model without class names."""
    for training, other in itertools.permutations([[1, 2], [1.0, 2.0], ["1", "2"]], 2):
        assert encoded(labels_of(training), other) == [0, 1]
    labels = Labels(SINGLE, ("LABEL_0", "LABEL_1", "LABEL_2"), ("label",))
    assert encoded(labels, ["2", "0", "LABEL_1"]) == [2, 0, 1]


def test_several_columns() -> None:
    """Of several labels they hold nothing but 0 and 1."""
    for one, other, problem in (
        ([1, 0], [1, 1], MULTI),
        (["1", "0"], ["1", "1"], MULTI),
        ([1.0, 0.0], [1, 1], MULTI),
        ([True, False], [1, 1], MULTI),
        (["4.5", "3"], ["2", "3"], REGRESSION),
    ):
        table = columns_table(toxic=one, rude=other, third=[5, 5])
        labels = find_labels(table, ("toxic", "rude"))
        assert (labels.problem_type, labels.names) == (problem, ("toxic", "rude"))
        assert labels.encode(table).tolist() == np.array([one, other]).T.astype(float).tolist()
    labels = find_labels(columns_table(toxic=[1, 0], rude=[1, 1]), ("toxic", "rude"))
    for odd in ([0, 2], [0, 0.5], ["0", "yes"], [0, None]):
        table = columns_table("v.csv", toxic=[1, 0], rude=odd)
        refusal(labels.encode, table, match=r"v\.csv, row 2")


def test_columns_that_are_no_labels() -> None:
    for cells, settings, expected in (
        (["a", "a"], {}, "at least two classes"),
        ([["a"], ["a"]], {}, "at least two classes"),
        ([[], []], {}, "at least two classes"),
        (TEXTS, {}, "490 different values.* than half .*is it the label.* --problem_type single"),
        (PAIRS, {}, "joins of 12 names.* --label_separator ','"),
        ([{"a": 1}, {"a": 2}], {}, "holds {'a': 1}, no class"),
        (['{"a": 1}', '{"a": 2}'], {}, "no class"),
        (["['a' 'b']", "['a']"], {}, "no class"),  # as numpy writes them
        (["[0 1]", "[1 0]"], {}, r"holds \[0 1\], no class"),
        ([[0, 1], [1, 0]], {}, "names all of 0, 1 in every row: .*a column per class"),
        (["[a, b]", "[b]"], {}, r"holds \[a, b\], no class"),
        (["('a', 'b')", "('b',)"], {}, "no class"),
        ([[["a"]], [["b"]]], {}, "no class"),
    ):
        refusal(labels_of, cells, **settings, match=rf"f\.csv: .*'label'.*{expected}")


def test_a_label_that_cannot_be_meant_names_file_and_row() -> None:
    for training, settings, other, expected in (
        (["a", "b"], {}, ["a", None], "no label: fill it"),
        (["a", "b"], {}, ["a", ""], "no label"),
        (["a", "None"], {}, ["a", None], "no label"),  # the class `None` is not the missing label
        ([1.0, 2.0], {}, [1.0, float("nan")], "no label"),
        ([["a", "b"]], {}, [["a"], None], r"no labels: write \[\]"),
        (["good", "bad"], {}, ["good", "god"], r"'god' .*did you mean good.* bad, good"),
        ([1, 2], {}, [1.0, 1.5], r"'1\.5' does not occur in training"),
        ([["a", "b"]], {}, [["a"], ["b", "c"]], "'c' does not occur in training"),
        ([["a", "b"]], {}, ['["a"]', '["b"'], "no list of labels.*--label_separator"),
        ([[0, 1]], {}, [[1], [1, 0, 1]], "names a class twice"),
        ([["a"], ["b"]], {}, [["a"], ["b", "a"]], "several labels.*multi_label_classification"),
        ([["a"], ["b"]], {}, [["a"], []], "no label"),
        (["1.5", "2", "85%"], {}, ["2", "85%"], "'85%' is not a number.*--problem_type"),
        ([1.5, 2], {}, ["1", "inf"], "'inf' is not a number"),
        ([1.5, 2], {}, ["1", "1_5"], "'1_5' is not a number"),
    ):
        labels = labels_of(training, **settings)
        refusal(encoded, labels, other, match=rf"v\.csv, row 2: .*{expected}")
        refusal(labels.encode, columns_table("v.csv"), match=r"v\.csv has no column 'label'")


def test_rows_without_labels() -> None:
    """An empty cell of several labels is a row without classes, unless all are empty."""
    one = labels_of(["a", "b"])
    several = labels_of(["a|b", "c"], separator="|")
    for labels in (one, several):
        assert labels.missing(table_of(["", " "])).all()
        assert labels.missing(columns_table()).all()
    assert not several.missing(table_of(["", "a"])).any()
    assert one.missing(table_of(["", "a", None])).tolist() == [True, False, True]
    assert labels_of([0, 1], NAMED).missing(table_of([-1, 1], NAMED)).tolist() == [True, False]
    columns = find_labels(columns_table(a=[1, 0], b=[0, 1]), ("a", "b"))
    rows = columns_table(a=["", "1"], b=["", "0"])
    assert columns.missing(rows).tolist() == [True, False]
