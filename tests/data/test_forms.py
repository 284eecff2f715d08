"""Files as people bring them: each form is read, or an error names the form and the shortest way;
a model reads a file as its training file was read. toolkit/data/text_files.py, read.py."""

import gzip
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from tests.report.made import save_columns
from toolkit.config import TextSettings
from toolkit.data.columns import header_notes, require_columns
from toolkit.data.options import reading_settings, remembered_settings
from toolkit.data.read import read_file, read_hub, replacement_notes
from toolkit.evaluation.saved_model import fitting_settings

ROWS = [{"text": "a, b", "label": "x"}, {"text": "c", "label": "y"}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)
BOTH = {"names": "text,label"}


pytestmark = pytest.mark.usefixtures("toolkit_cache")


def rows_of(path: Path, content: str | bytes, **options: Any) -> Any:
    """`names`: --column_names."""
    if "names" in options:
        options["column_names"] = options.pop("names")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_file(str(path), TextSettings(**options)).rows


def test_the_same_rows_in_every_form(tmp_path: Path) -> None:
    for name, content, options in (
        ("a.txt", "a, b_!_x\nc_!_y\n", {"delimiter": "_!_", **BOTH}),
        ("a.csv", "text || label\na, b || x\nc || y\n", {"delimiter": " || "}),
        ("a.tsv", "text，label\na, b，x\nc，y\n", {"delimiter": "，"}),
        ("a.txt", "a, b\x01x\nc\x01y\n", {"delimiter": r"\x01", **BOTH}),
        ("a.txt", "a, b\tx\nc\ty\n", BOTH),
        ("a.txt", "__label__x a, b\n\nc __label__y\n", {}),
        ("a.txt", LINES, {}),
        ("a.txt", json.dumps(ROWS, indent=1), {}),
        ("a.json", LINES, {}),
        ("a.jsonl", json.dumps(ROWS, indent=1), {}),
        ("a.json", json.dumps({"train": ROWS}), {}),
        ("a.json", json.dumps({"version": 1, "data": ROWS}), {}),
        ("a.json", json.dumps({"RECORDS": ROWS}), {}),
    ):
        assert rows_of(tmp_path / name, content, **options).to_list() == ROWS


def test_names_that_are_numbers_and_labels_that_are_several(tmp_path: Path) -> None:
    for header in (",0,1", "text,0,1"):
        assert len(rows_of(tmp_path / "a.csv", f"{header}\n0,a,1\n1,b,0\n")) == 2
    rows = rows_of(tmp_path / "a.txt", "a\n__label__x b\n__label__x __label__y c\n" * 9)
    assert list(rows["label"][:3]) == [[], ["x"], ["x", "y"]]


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    for number in range(10, 0, -1):
        path = tmp_path / "train" / f"class {number % 2}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}\nof two lines\n")
    rows = read_file(str(tmp_path / "train"), TextSettings()).rows
    assert rows[4:6] == {
        "text": ["text 10\nof two lines", "text 1\nof two lines"],
        "label": ["class 0", "class 1"],
        "file": ["class 0/10.txt", "class 1/1.txt"],
    }
    files = read_file(str(tmp_path / "train" / "*" / "*.txt"), TextSettings())
    for table in (files, read_hub(str(tmp_path))["train"]):
        says = f"pass --train_file {tmp_path / 'train'}"
        refusal(require_columns, table, None, "label_column", ("label",), says=[says])
    path.write_bytes("很好".encode("gb18030"))
    fault = refusal(lambda: read_file(str(tmp_path / "train"), TextSettings()).rows)
    assert fault == f"{path}, line 1: not utf-8: pass --encoding gb18030"


def test_an_error_names_the_form(tmp_path: Path) -> None:
    for name, content, options, says in (
        ("a.txt", "a\t1\nb\t2\n", {}, "--delimiter tab .*--column_names.*--delimiter none"),
        ("a.tsv", "a\t1\nb\t2\nc\t1\n", {}, "'1' is also the cell of row 2: .*with 2 names"),
        ("a.csv", "text\tlabel\na\t1\n", {}, "'text\\\\tlabel': pass --delimiter tab"),
        ("a.csv", LINES, {}, "holds JSON: name it .json"),
        ("a.txt", json.dumps(ROWS), {"delimiter": "tab"}, "holds JSON.*leave out --delimiter"),
        ("a.txt", "__label__x a b\n", {"delimiter": " ", **BOTH}, "fastText's: name it .txt"),
        ("a.txt", "a\n", BOTH, "1 cells where .* has 2: pass --column_names with 1 names"),
        ("a.tsv", "Label\tText\n1\ta\n", BOTH, "is a header, .* leave out --column_names"),
        ("a.csv", "sep=;\ntext;label\na;1\n", {"delimiter": ";"}, "Excel's note.*remove that line"),
        ("a.csv", gzip.compress(b"text"), {}, "add .gz to its name"),
        ("a.csv", b"PAR1\xff", {}, "Parquet file: name it .parquet"),
        ("a.txt", "{'text': 'a'}\n{'text': 'b'}\n", {}, "line 1: not JSON"),
        ("a.jsonl", '["a", 1]\n["b", 2]\n', {}, "row 1: .*is no object with named fields"),
        ("a.json", json.dumps({"v": 1, "data": {"train": ROWS}}), {}, "a file for each list"),
        ("a.csv", "t,y\na,1\nb;2\n", {}, "line 3: 1 cells where the header has 2: put cells"),
        ("a.json", json.dumps({"train": ROWS, "test": ROWS}), {}, "a file for each list of rows"),
        ("a.json", '{"text": {"0": "a"}, "y": {"0": 1}}', {}, "orient=.records"),
        ("a.xlsx", "PK", {}, "saved as `CSV UTF-8` in Excel"),
    ):
        assert re.search(says, refusal(rows_of, tmp_path / name, content, **options))


def test_advice_for_a_column_that_is_unclear(tmp_path: Path) -> None:
    for name, content, advice in (
        ("a.csv", "2.5\n3.5\n", "if the first line is a row, pass --column_names"),
        ("a.txt", "a::1\nb::2\n", "pass --delimiter '::'"),
        ("a.txt", "a -> 1, 2\nb -> 2\n", "pass --delimiter '->'"),
        ("a.jsonl", LINES, "with --other"),
    ):
        rows_of(tmp_path / name, content)
        table = read_file(str(tmp_path / name), TextSettings())
        assert refusal(require_columns, table, None, "other", ("other",)).endswith(advice)
        notes = "".join(header_notes(table, table.rows.column_names[0]))
        assert notes.endswith(advice) if name == "a.csv" else notes == ""


def test_bad_bytes_are_replaced_when_asked(tmp_path: Path) -> None:
    content = "text\n" + "很好\n" * 20
    encoded = content.encode("gb18030") + b"\xba\n"
    says = ["line 2: not utf-8", "--encoding gb18030 --encoding_errors replace", ": 1 of its"]
    refusal(rows_of, tmp_path / "a.csv", encoded, says=says)
    settings = TextSettings(encoding="gb18030", encoding_errors="replace")
    table = read_file(str(tmp_path / "a.csv"), settings)
    (note,) = replacement_notes(table, settings)
    assert note.startswith("1 of 21 rows have bytes that are not gb18030")
    assert note.endswith("(rows 21)")
    assert not list(replacement_notes(table, TextSettings()))


TRAINED = TextSettings(
    train_file="data/t.txt", encoding="gb18030", delimiter="tab", column_names="text,y"
)


def test_a_file_is_read_as_in_training_where_it_has_that_form(tmp_path: Path) -> None:
    for name, content, fits in (
        ("a.txt", "很\t1\n".encode("gb18030"), {"encoding", "delimiter", "column_names"}),
        ("a.txt", "很\t1\n".encode(), {"delimiter", "column_names"}),
        ("a.txt", b"y\ttext\n1\tb\n", {"delimiter"}),  # a header
        ("a.txt", b"y\tSentence\n1\tb\n", {"delimiter"}),
        ("a.txt", b"a text a line\n", set()),
        ("a.csv", b"a\t1\n", set()),
    ):
        save_columns(tmp_path / "model", text_column="text", **remembered_settings(TRAINED))
        path = tmp_path / name
        path.write_bytes(content)
        fitting = fitting_settings(str(tmp_path / "model"), str(path), None)
        assert set(fitting) == fits
        assert remembered_settings(TextSettings(train_file="a.csv")) == {}
        options = dict.fromkeys(("encoding", "encoding_errors", "quoting", "column_names"))
        given = Namespace(**options, delimiter=";")
        settings = reading_settings(given, **fitting)
        assert (settings.delimiter, settings.encoding == "gb18030") == (";", "encoding" in fits)
