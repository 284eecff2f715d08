"""toolkit/data/labels.py: label columns -> class ids, multi-hot rows or numbers."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from tests.faults import refusal
from toolkit.config import ProblemType
from toolkit.data.balance import doubtful_names
from toolkit.data.labels import Labels, find_labels, natural_order
from toolkit.data.read import read_class_names
from toolkit.data.table import Table

ONE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
NAMED = datasets.ClassLabel(names=["joy", "anger", "unused"])


def table_of(
    labels: Sequence[Any], feature: Any = None, name: str = "f.csv", column: str = "label"
) -> Table:
    features = (
        datasets.Features({"text": datasets.Value("string"), column: feature}) if feature else None
    )
    columns = {"text": ["t"] * len(labels), column: list(labels)}
    return Table(datasets.Dataset.from_dict(columns, features=features), name, "d")


def found(labels: Sequence[Any], problem: ProblemType | None = None, feature: Any = None) -> Labels:
    return find_labels(table_of(labels, feature), None, problem, "text")


def encoded(
    labels: Labels, values: Sequence[Any], feature: Any = None, name: str = "f.csv"
) -> list[Any]:
    return labels.encode(table_of(values, feature, name), np.arange(len(values))).tolist()


AB, ABC = ("a", "b"), ("0", "1", "2")
SCORES = [[4.17, 0.3, 2.2], [3, 2.5, 2.0]]
TEXTS = [f"text {number}" for number in range(490)]


@pytest.mark.parametrize(
    ("labels", "problem", "inferred", "names", "targets"),
    [
        (["neg", "pos", "neg"], None, ONE, ("neg", "pos"), [0, 1, 0]),
        (["差", "好"], None, ONE, ("好", "差"), [1, 0]),
        ([1, 0, 1], None, ONE, ("0", "1"), [1, 0, 1]),
        ([-1, 1, 0], None, ONE, ("-1", "0", "1"), [0, 2, 1]),
        ([100, 7, 9], None, ONE, ("7", "9", "100"), [2, 0, 1]),
        ([1.0, 3.0, 1.0], None, ONE, ("1", "3"), [0, 1, 0]),  # integers that a reader widened
        ([True, False], None, ONE, ("False", "True"), [1, 0]),
        (["None", "a"], None, ONE, ("None", "a"), [0, 1]),
        ([" a", "b "], None, ONE, AB, [0, 1]),
        (["class 10", "class 2"], None, ONE, ("class 2", "class 10"), [1, 0]),
        ([["b", "a"], ["b"], []], None, MULTI, AB, [[1, 1], [0, 1], [0, 0]]),
        (['["b", "a"]', '["b"]', "[]"], None, MULTI, AB, [[1, 1], [0, 1], [0, 0]]),
        (
            ["['b', 'a']", "['b']", "[]"],
            None,
            MULTI,
            AB,
            [[1, 1], [0, 1], [0, 0]],
        ),  # as pandas writes lists to CSV
        (["b|a", "b", ""], MULTI, MULTI, AB, [[1, 1], [0, 1], [0, 0]]),
        (["b, a", "b, ", " "], MULTI, MULTI, AB, [[1, 1], [0, 1], [0, 0]]),
        (["b，a", "b", "[]"], MULTI, MULTI, AB, [[1, 1], [0, 1], [0, 0]]),
        (["b;a", "b", "[]"], MULTI, MULTI, AB, [[1, 1], [0, 1], [0, 0]]),
        ([[1, 0, 1], [0, 0, 1]], None, MULTI, ABC, [[1, 0, 1], [0, 0, 1]]),
        ([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], None, MULTI, ABC, [[1, 0, 1], [0, 0, 1]]),
        (["[1, 0, 1]", "[0, 0, 1]"], None, MULTI, ABC, [[1, 0, 1], [0, 0, 1]]),
        ([["1", "0", "1"], ["0", "0", "1"]], None, MULTI, ABC, [[1, 0, 1], [0, 0, 1]]),
        (["1|0|1", "0|0|1"], MULTI, MULTI, ABC, [[1, 0, 1], [0, 0, 1]]),
        (
            ["[1 0 1]", "[0 0\n 1]"],
            None,
            MULTI,
            ABC,
            [[1, 0, 1], [0, 0, 1]],
        ),  # as pandas writes arrays to CSV
        (
            ["['b' 'a']", "['b']", "['b c' 'a']"],
            None,
            MULTI,
            ("a", "b", "b c"),
            [[1, 1, 0], [0, 1, 0], [1, 0, 1]],
        ),
        (
            ["[1.5 -2. ]", "[0.5  1. ]"],
            None,
            REGRESSION,
            ("label_0", "label_1"),
            [[1.5, -2], [0.5, 1]],
        ),
        (
            [[0], [1], [0, 1]],
            None,
            MULTI,
            ("0", "1"),
            [[1, 0], [0, 1], [1, 1]],
        ),  # class ids, not multi-hot
        ([[3], [7, 3], [10]], None, MULTI, ("3", "7", "10"), [[1, 0, 0], [1, 1, 0], [0, 0, 1]]),
        ([0.5, 1.0, -2.25], None, REGRESSION, ("label",), [0.5, 1.0, -2.25]),
        ([3.5, 2.0, 7.0], None, REGRESSION, ("label",), [3.5, 2.0, 7.0]),
        ([[1.5], [2]], None, REGRESSION, ("label",), [1.5, 2.0]),
        (
            SCORES,
            None,
            REGRESSION,
            ("label_0", "label_1", "label_2"),
            np.array(SCORES, np.float32).tolist(),
        ),
    ],
)
def test_what_a_column_means(
    labels: Any, problem: Any, inferred: Any, names: tuple[str, ...], targets: Any
) -> None:
    decided = found(labels, problem)
    assert (decided.problem_type, decided.names, encoded(decided, labels)) == (
        inferred,
        names,
        targets,
    )
    array = decided.encode(table_of(labels), np.array([0, len(labels) - 1]))
    assert array.dtype == (np.int64 if inferred == ONE else np.float32)
    assert array.tolist() == [targets[0], targets[-1]]


def test_the_run_says_that_lists_of_0_and_1_are_not_class_numbers() -> None:
    """`[0, 1]` may be the classes 0 and 1."""
    assert "not as class numbers" in found([[0, 1], [1, 0]]).describe()
    assert "class numbers" not in found([[0], [1], [0, 1]]).describe()


def test_a_data_sets_own_names_keep_their_order() -> None:
    decided = found([0, 1], feature=NAMED)
    assert (decided.names, encoded(decided, [1, 0], NAMED)) == (("joy", "anger", "unused"), [1, 0])
    assert encoded(decided, ["anger"]) == [1]  # from a file
    lists = datasets.List(NAMED)
    decided = found([[0], [0, 2]], feature=lists)
    assert decided.names == ("joy", "anger", "unused")
    assert encoded(decided, [[0], [0, 2]], lists) == [[1, 0, 0], [1, 0, 1]]
    odd = datasets.ClassLabel(names=["1.0", " b", "1", "b"])  # as they are written
    assert encoded(found([0, 1], feature=odd), [1, 0, 3, 2], odd) == [1, 0, 3, 2]
    refusal(find_labels, table_of([0, 1], NAMED), None, None, "text", class_names={"0": "x", "1": "y"},
            match="--label_names_file names classes that are numbers")  # fmt: skip


@pytest.mark.parametrize("names", [["a1", "a01", "a2"], ["1", "01", "-1"]])
def test_classes_that_sort_alike_have_one_order(names: list[str]) -> None:
    """A set's order, which depends on the process, is not theirs."""
    assert len({natural_order(order) for order in itertools.permutations(names)}) == 1


@pytest.mark.parametrize(
    ("training", "other"),
    [([1, 2], [1.0, 2.0]), ([1, 2], ["1", "2"]), ([1.0, 2.0], [1, 2]), (["1", "2", "1"], [1, 2])],
)
def test_the_same_labels_in_another_type_are_the_same(
    training: list[Any], other: list[Any]
) -> None:
    assert encoded(found(training), other) == [0, 1]


def test_class_ids_for_a_model_without_class_names() -> None:
    names = tuple(f"LABEL_{number}" for number in range(3))
    labels = Labels("single_label_classification", names, ("label",))
    assert encoded(labels, ["2", "0", "LABEL_1"]) == [2, 0, 1]
    refusal(encoded, labels, [3], says=["'3'", "LABEL_2"])


def columns_table(name: str = "f.csv", **columns: list[Any]) -> Table:
    return Table(datasets.Dataset.from_dict({"text": ["t", "u"], **columns}), name, "d")


@pytest.mark.parametrize(
    ("one", "other", "asked", "problem"),
    [
        *((ones, [1, 1], None, MULTI) for ones in ([1, 0], ["1", "0"], [1.0, 0.0], [True, False])),
        *((["4.5", "3"], ["2", "3"], asked, "regression") for asked in (None, "regression")),
    ],
)
def test_several_columns(
    one: list[Any], other: list[Any], asked: Any, problem: ProblemType
) -> None:
    table = columns_table(toxic=one, rude=other, third=[5, 5])
    decided = find_labels(table, "toxic, rude", asked, "text")
    assert (decided.problem_type, decided.names, decided.size) == (problem, ("toxic", "rude"), 2)
    assert (
        decided.encode(table, np.arange(2)).tolist()
        == np.array([one, other]).T.astype(float).tolist()
    )


@pytest.mark.parametrize("odd", [2, 0.5, "yes", None, float("nan")])
def test_several_columns_hold_nothing_but_0_and_1(odd: Any) -> None:
    good, bad = (
        columns_table(a=[1, 0], b=[0, 1]),
        columns_table("v.csv", a=[1, 0], b=[0 if odd != "yes" else "0", odd]),
    )
    said = r"v\.csv, row 2: column 'b'.* 0 or 1, or .*--problem_type regression"
    refusal(
        lambda: find_labels(bad, "a,b", None, "text").encode(bad, np.arange(len(bad))), match=said
    )
    refusal(find_labels(good, "a,b", None, "text").encode, bad, np.arange(2), match=said)


def test_lists_of_numbers_of_another_length_are_named() -> None:
    decided = found([str(score) for score in SCORES])
    assert (decided.problem_type, decided.size) == (REGRESSION, 3)
    for odd, said in (
        ([1.5, 2.5], "must hold 3 numbers"),
        ([1, "x", 2], "label_1: the label 'x' is not a number"),
    ):
        refusal(
            encoded, decided, [str(SCORES[0]), str(odd)], name="v.csv", says=["v.csv, row 2", said]
        )


@pytest.mark.parametrize(
    ("file", "content"),
    [("a.json", '["joy", "anger", "fear"]'), ("a.json", '{"2": "fear", "0": "joy", "1": "anger"}'),
     ("a.json", '{"joy": 0, "anger": 1, "fear": 2}'),
     ("a.jsonl", '{"label": "0", "label_desc": "joy"}\n{"label": "2", "label_desc": "fear"}\n["anger", 1]\n'),
     ("a.txt", "joy\nanger\n\nfear\n")],
)  # fmt: skip
def test_names_of_classes_from_a_file(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content, encoding="utf-8")
    names = read_class_names(str(tmp_path / file))
    assert list(names.items()) == [("0", "joy"), ("1", "anger"), ("2", "fear")]
    for labels, other, expected in (
        (["1", "0"], [2, 1.0], [2, 1]),
        ([[0, 1], [2]], [[0, 2]], [[1, 0, 1]]),
        ([[0, 1, 1], [0, 0, 1]], [[0, 0, 1]], [[0, 0, 1]]),
    ):
        decided = find_labels(table_of(labels), None, None, "text", class_names=names)
        assert (decided.names, encoded(decided, other)) == (("joy", "anger", "fear"), expected)
    says = ["f.csv: column 'label' holds 7, joy, and --label_names_file names 0, 1, 2"]
    refusal(
        find_labels, table_of(["joy", "7", "1"]), None, None, "text", class_names=names, says=says
    )


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("a.json", '[["joy", "anger"], ["joy", 1]]', r"entry \d: .* is not a number and a name"),
        ("a.json", '{"0": "joy", "1": " "}', r"entry 2: .* is not a number and a name"),
        ("a.json", '["joy", "joy"]', r"entry \d: .* is not a number and a name"),
        ("a.json", '[{"id": 1}, {"id": 2}]', r"entry \d: .* is not a number and a name"),
        (
            "a.csv",
            "id,name\n0,joy\n1,anger\n",
            r"write the names as \.json",
        ),  # its header would be class 0
        ("a.txt", "差\n好\n", "save it as UTF-8"),
    ],
)
def test_names_of_classes_that_cannot_be_meant(
    tmp_path: Path, file: str, content: str, said: str
) -> None:
    (tmp_path / file).write_text(content, encoding="gb18030")
    refusal(read_class_names, str(tmp_path / file), match=rf"--label_names_file .*{file}.*{said}")


@pytest.mark.parametrize(
    ("labels", "problem", "said"),
    [
        (["a", "a"], None, r"one class only \(a\)"),
        ([1, 1, 1], None, r"one class only \(1\)"),
        ([["a"], ["a"]], None, "one class only"),
        (["a", "a|a"], MULTI, "one class only"),
        ([[], []], None, "no class at all"),
        ([[0, 1], [0, 1]], None, r"holds \[0, 1\] in each row: .*--label_column"),
        (["a", None, "b"], None, "no label in column 'label' of rows 2:"),
        (
            ["a", "", "b", ""],
            None,
            "rows 2, 4: fill or remove them, or pass --drop_empty_text, which leaves them out$",
        ),
        (["a|b", "", "b", "a"], None, "rows 2: .*--problem_type multi_label"),
        ([1, None, 2], None, "rows 2:"),
        ([1.5, float("nan")], None, "rows 2:"),
        ([["a"], None, ["b"]], None, "rows 2: fill or remove them$"),
        (
            [f"text {number}" for number in range(2001)],
            None,
            "2001 different values.*--label_column",
        ),
        (TEXTS, None, r"490 different values in 490 rows: is it the label\?.*--problem_type"),
        # in two ways: grades or numbers of classes; 0 and 1 in one place only
        (
            ["[1, 5, 3]", "[2, 5, 4]"],
            None,
            r"holds \[1, 5, 3\].*numbers to predict.*--problem_type",
        ),
        (["[1.5, 0]", "[0.5, 1]"], None, r"holds \[1\.5, 0\].*numbers to predict"),
        (["[1.5, 2.5]", "[3.5]"], None, r"holds \[1\.5, 2\.5\].*numbers to predict"),
        (["[1.5, 'x']", "['y', 'x']"], None, r"holds \[1\.5, 'x'\].*numbers to predict"),
        (["4.17|0.3", "2|3.5"], None, r"holds '4\.17\|0\.3'.*numbers to predict"),
        (["3,5", "4", "2,0"], None, "holds '3,5'.*numbers to predict"),  # a decimal comma
        (
            [f"{number}.5 {number}" for number in range(9)],
            None,
            "holds '0.5 0'.*numbers to predict",
        ),
    ],
)
def test_columns_that_are_no_labels_or_ambiguous(
    labels: list[Any], problem: ProblemType | None, said: str
) -> None:
    refusal(found, labels, problem, match=rf"f\.csv: .*{said}")


NO_LABEL = "no label: fill it or remove the row"


@pytest.mark.parametrize(
    ("training", "problem", "other", "said"),
    [
        (["a", "b"], None, ["a", None], NO_LABEL),
        (["a", "b"], None, ["a", ""], NO_LABEL),
        (["a", "None"], None, ["a", None], NO_LABEL),  # the class `None` is not the missing label
        ([1.0, 2.0], None, [1.0, float("nan")], NO_LABEL),
        ([["a"], ["b"]], None, [["a"], None], NO_LABEL),
        ([["a"], ["b"]], None, [["a"], ["b", None]], NO_LABEL),
        ([["a"], ["b", ""]], None, [["a"], ["b", ""]], NO_LABEL),
        (
            ["good", "bad"],
            None,
            ["good", "god"],
            r"label 'god' does not .* \(did you mean good\?\).* bad, good",
        ),
        ([1, 2], None, [1, 3], "label '3' does not occur in training"),
        ([1, 2], None, [1.0, 1.5], r"label '1\.5' does not occur in training"),
        ([["a"], ["b"]], None, [["a"], ["b", "c"]], "label 'c' does not occur in training"),
        ([["a"], ["b"]], None, ['["a"]', '["b"'], "cannot be read as a list"),
        ([[1, 0, 1], [0, 1, 1]], None, [[1, 0, 1], [1, 0, 1, 1]], "a 0 or 1 for each of 3 classes"),
        ([1, 2], "regression", ["1", "good"], "'good' is not a number"),
        ([1, 2], "regression", ["1", ""], "'' is not a number"),
        *(
            (["1.5", "2", odd], None, ["2", odd], f"'{odd}' is not a number.*--problem_type")
            for odd in ("85%", "1_5")
        ),
        ([1, 2], "regression", ["1", "inf"], "'inf' is not a number"),
        ([1, 2], "regression", ["1", "1e39"], r"'1e39' .* \(3\.4e38\)"),
    ],
)
def test_a_label_that_cannot_be_meant_names_file_and_row(
    training: Any, problem: Any, other: Any, said: str
) -> None:
    refusal(
        encoded, found(training, problem), other, name="v.csv", match=rf"v\.csv, row 2: .*{said}"
    )


def test_columns_that_cannot_be_told() -> None:
    assert (
        found(TEXTS, ONE).size == found([*TEXTS, *TEXTS]).size == 490
    )  # nearly as many as rows, but asked for
    refusal(
        found(["a", "b"]).encode,
        table_of(["a", "b", "c"], name="v.csv"),
        np.array([1, 2]),
        match=r"v\.csv, row 3",
    )
    misspelt = table_of(["a"], name="v.csv", column="lable")
    refusal(
        found(["a", "b"]).encode,
        misspelt,
        np.arange(1),
        match=r"v\.csv has no column 'label': it has text, lable",
    )
    other, table = table_of(["a", "b"], column="y"), columns_table(a=[1, 0], b=[0, 1])
    refusal(find_labels, other, None, None, "text", match="Name one of y with --label_column")
    refusal(
        find_labels,
        table,
        "a,b",
        ONE,
        "text",
        match="several labels or numbers, not --problem_type single_label",
    )
    refusal(find_labels, table, "a,bb", None, "text", match=r"did you mean b\?")


def test_a_column_of_empty_strings_has_no_labels() -> None:
    """A test set without labels, in CSV, also of several labels, where one empty cell is a row without classes."""
    for labels in (found(["a", "b"]), found(["a|b", "c"], MULTI)):
        assert labels.all_missing(table_of(["", " "]))
        assert not labels.all_missing(table_of(["", "a"]))


def test_chinese_separators() -> None:
    assert encoded(found(["体育、财经", "体育｜财经", "体育"], MULTI), ["体育、财经", "财经"]) == [
        [1, 1],
        [0, 1],
    ]
    assert len(list(doubtful_names(["体育", "体育、财经", "财经"]))) == 1
    assert not list(doubtful_names(["a/b", "a", "b", "c|d"]))


def test_bytes_and_objects() -> None:
    """Strings without their type in Parquet, as of older Spark; they were trained on as `b'...'`."""
    table = Table(
        datasets.Dataset.from_dict({"text": ["好".encode(), b"x"], "label": [b"neg", b"pos"]}),
        "f",
        "d",
    )
    assert [*table.text_blocks(["text"], " ")] == [[["好", "x"]]]
    assert find_labels(table, None, None, "text").names == ("neg", "pos")
    other = Table(
        datasets.Dataset.from_dict(
            {"text": [b"\xff\xfe"], "lists": [["a"]], "objects": [{"zh": "a"}]}
        ),
        "f",
        "d",
    )
    for column in other.rows.column_names:
        refusal(lambda name=column: [*other.text_blocks([name], " ")], says=[repr(column)])
