"""toolkit/data/read.py and text_files.py: a file is read as it is written, or an error names the file
and the row."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from toolkit.config import TextSettings
from toolkit.data import text_files
from toolkit.data.read import read_file as read_with
from toolkit.data.read import read_hub
from toolkit.data.table import Table

FORMATS = ["csv", "tsv", "json", "jsonl", "parquet"]
TEXT_FORMATS = ["csv", "tsv", "json", "jsonl"]
TEXTS = 'a, "b"|很好\tc|null|NA|None|nan|N/A|-|007|1.50|1e3|true|2020-01-01'.split("|")
ROWS = [{"text": text, "label": text} for text in TEXTS]

WriteRows = Callable[..., str]


def read_file(name: str, **options: Any) -> Table:
    """Other forms of files: tests/data/test_forms.py."""
    return read_with(name, TextSettings(**options))


def fault_of(name: str, **options: Any) -> str:
    line = refusal(lambda: read_file(name, **options).rows)
    assert line.startswith(("--", name))
    return line


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.fixture(autouse=True, params=[7, text_files.BLOCK_ROWS])
def _block_rows(request: Any, monkeypatch: pytest.MonkeyPatch, toolkit_cache: Path) -> None:
    """Every test runs a second time in small blocks, as large files are read."""
    monkeypatch.setattr(text_files, "BLOCK_ROWS", request.param)


@pytest.mark.parametrize("kind", [*FORMATS, *(f"{kind}.gz" for kind in TEXT_FORMATS)])
def test_every_format_gives_the_same_rows(write_rows: WriteRows, kind: str) -> None:
    path = write_rows(f"a.{kind}", ROWS)
    assert read_file(path).rows.to_list() == ROWS
    # and where no other row is a text
    assert read_file(write_rows(f"b.{kind}", ROWS[-5:-1])).rows.to_list() == ROWS[-5:-1]


@pytest.mark.parametrize("kind", [*TEXT_FORMATS, "csv.gz", "jsonl.gz"])
def test_encodings(write_rows: WriteRows, kind: str) -> None:
    rows = [{"text": "plain", "label": "x"}, {"text": "很好，𠀀", "label": "坏b"}]
    gbk = write_rows(f"a.{kind}", rows, "gb18030")
    line = {"csv": 3, "tsv": 3, "json": 1, "jsonl": 2}[kind.split(".")[0]]
    fault = fault_of(gbk)
    assert f"{gbk}, line {line}: not utf-8" in fault
    assert "pass --encoding gb18030" in fault
    assert "pass --encoding gb18030" in fault_of(gbk, encoding="gb2312")
    assert read_file(gbk, encoding="gb18030").rows.to_list() == rows
    utf8 = write_rows(f"b.{kind}", rows)
    assert "pass --encoding utf-8" in fault_of(utf8, encoding="gb18030")
    marked = write_rows(f"c.{kind}", rows, "utf-8-sig")
    assert read_file(marked).rows.column_names == ["text", "label"]
    assert read_file(marked, encoding="gb18030").rows.to_list() == rows
    wide = write_rows(f"d.{kind}", rows, "utf-16")
    assert read_file(wide).rows.to_list() == rows
    assert "--encoding 'gbk8'" in fault_of(utf8, encoding="gbk8")


def test_what_is_no_file_to_read(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    path = write(tmp_path / "reviews.csv", "text\na\n")
    assert "(did you mean reviews.csv" in fault_of(str(tmp_path / "review.csv"))
    assert "is no file" in fault_of(str(tmp_path / "folder.csv"))
    assert "no file has such a name" in fault_of(str(tmp_path / "x-*.csv"))
    for name in ("a.md", "a", "b.csv.zip", "a.gz"):
        fault = fault_of(write(tmp_path / name, "text,label\na,1\n"))
        assert all(f".{kind}" in fault for kind in FORMATS)
    path = write(tmp_path / "a.csv", "text\na\n")
    assert "--delimiter " in fault_of(path, delimiter='"')


GZIP = gzip.compress(b"text,label\na,1\n", mtime=0)


def test_invalid_files_are_named(tmp_path: Path) -> None:
    for name, content, expected in (
        ("a.csv", "", "is empty"),
        ("a.csv", "text,label\n", "no rows"),
        ("a.json", "[]", "no rows"),
        ("a.json", "{", "not JSON"),
        ("a.jsonl", '{"text":"a"}\n{"text":\n', "line 2: not JSON"),
        ("a.parquet", "abc", "cannot be read as .parquet"),
        ("a.csv.gz", GZIP[:-6], "cannot be read as .csv"),
        ("a.csv.gz", GZIP[:12] + b"xyz" * 9, "cannot be read as .csv"),
        ("a.csv", b"PK\x03\x04\xff\xfe", "Excel workbook"),
        ("a.csv", b"text\n" + b"fine\n" * 5 + b"caf\xe9\nfine\n", "line 7: not utf-8: correct"),
        ("a.csv", "text,label\na,1\nb,c,2\nd,3\n", "line 3: 3 cells where the header has 2"),
        # pandas, and csv.writer, write such a text without quotes
        ("a.csv", "text,label\na,1\nb\rc,1\n", "line 3: .*lone carriage return"),
        ("a.csv", "text,label,text\na,1,b\n", "more than one column 'text'"),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', "row 2: "),
        ("a.jsonl", '{"text": "a"}\n{"text": "b\\ud83d"}\n', "row 2: field 'text' is 'b"),
        ("a.jsonl", '{"label": [1]}\n{"label": ["b", 1]}\n', "row 2: field 'label' is"),
        ("a.jsonl", '{"y": 1}\n' * 9 + '{"y": "b"}\n', "row 10: field 'y' is 'b'|another type"),
    ):
        assert re.search(expected, fault_of(write(tmp_path / name, content)))


def quoted(opening: str, closing: str) -> str:
    rows = [f"text {number},{number % 2}" for number in range(200)]
    rows[40] = opening
    rows[169] = closing
    return "text,label\n" + "".join(f"{row}\n" for row in rows)


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize(
    ("closing", "expected"),
    [
        ('the film " was good,1', "line 42: a double quote that begins a cell is not closed"),
        ("none at all,1", "line 42: a double quote that begins a cell is not closed"),
        # valid CSV, but for the labels within
        ('a screen of 5",0', "row 41: a double quote that begins a cell takes in 129 rows"),
    ],
)
def test_an_unclosed_quote(tmp_path: Path, separator: str, closing: str, expected: str) -> None:
    content = quoted('"a text of its own,1', closing).replace(",", separator)
    path = write(tmp_path / ("a.csv" if separator == "," else "a.tsv"), content)
    line = fault_of(path)
    assert expected in line
    assert "--quoting none" in line
    texts = read_file(path, quoting="none").rows["text"]
    assert (len(texts), texts[40]) == (200, '"a text of its own')


def test_texts_of_several_lines_and_quotes_within_are_no_fault(tmp_path: Path) -> None:
    letter = "Dear John,\r\nthanks,\n\nBob"
    content = quoted(f'"{letter}",1', '"5"" screen",0') + f'a\0b 5",1\n\n{"a" * 200_000},'
    rows = read_file(write(tmp_path / "a.csv", content)).rows
    assert (len(rows), rows["text"][40], rows["text"][169]) == (202, letter, '5" screen')
    assert rows[200:] == {"text": ['a\0b 5"', "a" * 200_000], "label": ["1", ""]}


def test_files_as_they_come(tmp_path: Path) -> None:
    for name, content, options, columns in (
        ("c.csv", "a,1\n\nb,0", {"column_names": "text, y"}, {"text": ["a", "b"], "y": ["1", "0"]}),
        ("d.csv", ",text\r\n0,a\r\n", {}, {"Unnamed: 0": ["0"], "text": ["a"]}),
        ("e.txt", "a, 'b\n\n c\rd\r\n", {}, {"text": ["a, 'b", "", " c\rd"]}),
        ("e2.txt", "a\t1\nb\t2\n", {"delimiter": "none"}, {"text": ["a\t1", "b\t2"]}),
        ("f.txt", "a\nb\n\nc\n", {"sample_by": "paragraph"}, {"text": ["a\nb", "c"]}),
        ("i.jsonl", '{"a": 1}\n{"a": 1.5, "b": "x"}\n', {}, {"a": [1.0, 1.5], "b": [None, "x"]}),
    ):
        assert read_file(write(tmp_path / name, content), **options).rows.to_dict() == columns


def test_a_pattern_reads_its_files_in_natural_order(write_rows: WriteRows, tmp_path: Path) -> None:
    rows = [{"text": f"text {number}", "label": str(number % 2)} for number in range(40)]
    for place in range(10):
        write_rows(f"part-{place + 1}.csv", rows[4 * place : 4 * place + 4])
    pattern = str(tmp_path / "part-*.csv")
    whole = read_file(pattern)
    assert whole.rows.to_list() == rows
    assert whole.where(9) == f"{tmp_path / 'part-3.csv'}, row 2"
    assert "part-3.csv, row 2" in whole.listing([9])
    write_rows("part-11.csv", [{"text": "a", "other": "b"}])
    says = ["part-11.csv has the columns text, other"]
    refusal(lambda: read_file(pattern).rows, says=says)


def test_a_folder_is_read_again_when_its_content_changes(tmp_path: Path) -> None:
    digests = set()
    path = tmp_path / "data" / "train.jsonl"
    path.parent.mkdir()
    for text in ("a", "b"):
        path.write_text(json.dumps({"text": text}))
        os.utime(path, (1, 1))
        table = read_hub(str(path.parent))["train"]
        assert list(table.rows["text"]) == [text]
        digests.add(table.digest)
    assert len(digests) == 2
    refusal(read_hub, str(tmp_path / "nothing"), match="HF_HUB_OFFLINE")
