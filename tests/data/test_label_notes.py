"""What a run says about columns and classes that it has guessed: which others may be meant, and which classes may be
none, several, or typing errors."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from tests.faults import refusal

PARTS = ("价格", "味道", "服务", "送餐")
JOINED = [*combinations(PARTS, 1), *combinations(PARTS, 2), *combinations(PARTS, 3)]
Notes = Callable[..., str]


def rows_of(cells: list[Any], **columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Rows of texts and these labels; more columns are functions of the row's number."""
    rows = []
    for number, cell in enumerate(cells):
        others = {name: value(number) for name, value in columns.items()}
        rows.append({"text": f"第 {number} 条", "label": cell} | others)
    return rows


@pytest.fixture
def notes_on(prepared: Any) -> Notes:
    """Of cells of labels, each in several rows, the notes."""

    def notes(cells: list[Any], **settings: Any) -> str:
        rows = rows_of(cells)
        return "\n".join(prepared(rows, validation_file=rows[:4], **settings).notes)

    return notes


@pytest.mark.parametrize("separator", [*",，、/+#;；| \\-", "||"])
def test_classes_that_are_joins_of_few_names(notes_on: Notes, separator: str) -> None:
    cells = [separator.join(names) for names in JOINED] * 3
    advice = f"14 classes are joins of 4 names.* --label_separator '{separator}'"
    assert advice.partition(".*")[0] in notes_on(cells)
    assert advice.partition(".*")[2] in notes_on(cells)
    assert "joins" not in notes_on(cells, label_separator=separator)


@pytest.mark.parametrize(
    "cells",
    [
        ["card lost", "card arrival", "refund", "top up"],
        ["0 0 1", "0 1 0", "1 0 0"],
        ["very good", "good", "fine", "bad", "very bad"],
    ],
)
def test_classes_that_are_no_joins(notes_on: Notes, cells: list[str]) -> None:
    """The separator of the second would not read them: `0` is there twice."""
    assert "joins" not in notes_on(cells * 3)


@pytest.mark.parametrize(
    "name", "- -- ? UNKNOWN nan None N/A <NA> no_label 无 未知 待标注 暂无 -100".split()
)
def test_classes_that_may_be_no_label(notes_on: Notes, name: str) -> None:
    assert f"if class {name!r} means that a row has no label" in notes_on(["a", "b", name] * 2)
    ordinary = ["-1", "0", "1", "neutral", "无聊", "a-b", "nano", "★", "C#"]
    assert "if class" not in notes_on(ordinary * 2)
    assert "if class '-1' means that a row has no label" in notes_on([-1, 0, 1, 2] * 2)


def test_a_second_separator_and_a_decimal_comma(notes_on: Notes) -> None:
    cells = ["a,b", "b;c", "a", "b", "c", "c;a"]
    assert "joins of 3 names: if" in notes_on(cells * 3, label_separator=",")
    assert "write ',' for ';' in the file, too" in notes_on(cells * 3, label_separator=",")
    assert "'2,5' needs a point instead of the comma" in notes_on(["1", "0,5", "2,5"] * 3)


def test_a_class_of_one_row_beside_large_ones_is_named_with_its_row(notes_on: Notes) -> None:
    cells = ["positive", "negative"] * 110
    cells[6] = "postive"
    for labels in (cells, [[cell, "x"] for cell in cells]):
        assert "which may be typing errors: 'postive' (row 7)" in notes_on(labels)
    assert "typing errors" not in notes_on(cells[4:12])
    assert "classes 'Pos', 'pos' have almost the same name" in notes_on(["Pos ", "pos"] * 3)


def test_columns_that_are_as_likely_a_label_or_a_text(prepared: Any) -> None:
    rows = rows_of(
        ["a", "b"] * 20, number=int, guid=lambda row: f"id{row}", question=lambda row: f"问 {row}?",
        stance=lambda row: "xyz"[row % 3], tags=lambda row: [str(row % 4)], meta=lambda row: {"a": row % 2},
    )  # fmt: skip
    notes = prepared(rows).notes
    assert notes[0] == "not read: column number, guid, question, stance, tags, meta"
    assert notes[1].startswith("the label is read from column label: column stance, tags may be")
    assert notes[2].startswith("the text is read from column text: column question has texts")
    named = prepared(rows, label_column="label", text_column="text", text_pair="question")
    assert not any("is read from column" in note or "not read" in note for note in named.notes)


def test_a_column_of_objects_is_not_offered(prepared: Any) -> None:
    rows = [{"text": "a", "meta": {"a": 1}}, {"text": "b", "meta": {"a": 2}}]
    refusal(prepared, rows, match="which column is the label.*meta holds lists or objects")
    rows = [row | {"y": 1} for row in rows]
    refusal(prepared, rows, match="name one of y with --label_column")
    rows = [{"tokens": ["a"], "label": label} for label in "xy"]
    refusal(prepared, rows, match="which column is the text.*tokens holds lists")
