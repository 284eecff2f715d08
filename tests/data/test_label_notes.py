"""What a run asks about columns and classes that it has guessed (toolkit/data/label_notes.py, columns.py)."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.faults import refusal
from tests.report.made import make_run
from toolkit.data.labels import Labels, find_labels
from toolkit.data.table import Table
from toolkit.report.html import write_report_of_folder

PARTS = ("价格", "味道", "服务", "送餐")
JOINED = [*PARTS, *combinations(PARTS, 2), *combinations(PARTS, 3)]
ROWS = [{"text": f"第 {number} 条", "label": "ab"[number % 2]} for number in range(40)]


def with_columns(**columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    """ROWS with more columns, which are functions of the row's number."""
    rows = []
    for number, row in enumerate(ROWS):
        rows.append(row | {name: value(number) for name, value in columns.items()})
    return rows


def notes_on(cells: list[Any]) -> str:
    table = Table.of(datasets.Dataset.from_dict({"label": cells}), "f.csv")
    labels = find_labels(table, ("label",))
    return "\n".join(labels.notes(table, labels.encode(table)))


@pytest.mark.parametrize("separator", list(",，、/+#;；| "))
def test_classes_that_are_joins_of_few_names(separator: str) -> None:
    cells = [name if isinstance(name, str) else separator.join(name) for name in JOINED]
    found = notes_on(cells)
    assert found.startswith("14 classes are joins of 4 names")
    assert found.endswith(f"--label_separator {separator!r}")


def test_classes_of_several_words_are_not_joins() -> None:
    assert notes_on(["card lost", "card arrival", "refund", "top up"]) == ""
    assert notes_on(["0 0 1", "0 1 0", "1 0 0"]) == ""  # --label_separator would not read them


@pytest.mark.parametrize("name", "- -- ? UNKNOWN unk nan None N/A null 无 未知 不详 -100".split())
def test_classes_that_may_be_no_label(name: str) -> None:
    assert f"if class {name!r} means that a row has no label" in notes_on(["a", "b", name])


def test_ordinary_classes_are_not_asked_about() -> None:
    assert notes_on(["-1", "0", "1", "neutral", "无聊", "a-b", "nano"]) == ""


def test_a_class_of_one_row_beside_often_ones_is_named_with_its_row() -> None:
    cells = ["positive", "negative"] * 100
    assert notes_on(cells) == ""
    cells[6] = "postive"
    assert notes_on(cells) == "class 'postive' has one row, is it a typing error? (row 7)"
    lists = [[cell, "x"] for cell in cells]
    assert notes_on(lists) == notes_on(cells)
    assert notes_on(["Pos", "pos"]).startswith("classes 'Pos', 'pos' have almost the same name")


def test_columns_that_are_as_likely_a_label_or_a_text(prepared: Any) -> None:
    rows = with_columns(
        number=lambda row: row, guid=lambda row: f"id{row}", question=lambda row: f"问 {row}?",
        stance=lambda row: "xyz"[row % 3], tags=lambda row: [str(row % 4)], meta=lambda row: {"a": row % 2},
    )  # fmt: skip
    asked = "\n".join(prepared(rows).notes)
    assert "is label the label? column stance, tags may be it" in asked
    assert "is text the text? column question has texts, too" in asked
    named = prepared(rows, label_column="label", text_pair="question")
    assert not any(note.startswith("is ") for note in named.notes)


def test_a_column_of_objects_is_not_offered(prepared: Any) -> None:
    rows = [{"text": row["text"], "meta": {"a": 1}} for row in ROWS]
    refusal(prepared, rows, match="which column is the label.*meta holds objects")
    rows = with_columns(meta=lambda row: {"a": 1}, y=lambda row: row % 2)
    for row in rows:
        del row["label"]
    refusal(prepared, rows, match="name one of y with --label_column")


def test_the_report_page_names_the_columns(tmp_path: Path) -> None:
    labels = Labels("single_label_classification", ("a", "b"), ("STANCE",))
    line = {"id": 0, "label": "a", "prediction": "b", "probabilities": [0.25, 0.75]}
    columns = {"text_column": "TEXT", "text_pair": "TARGET", **labels.source()}
    make_run(tmp_path / "run", labels, [line], {"loss": 0.5}, **columns)
    page = write_report_of_folder(tmp_path / "run").read_text(encoding="utf-8")
    assert "TEXT and TARGET, labels in STANCE" in page
