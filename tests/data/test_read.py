"""toolkit/data/read.py: files -> tables, with errors that name the file and the row."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from toolkit.data import parse
from toolkit.data.read import Table, find_column, read_file, read_hub
from toolkit.errors import UserError

FORMATS = ["csv", "tsv", "json", "jsonl", "parquet"]
TEXT_FORMATS = ["csv", "tsv", "json", "jsonl"]
ROWS = [{"text": 'a, "b"', "label": "x"}, {"text": "很好\tc", "label": "y"}, {"text": "d", "label": "x"}]

WriteRows = Callable[..., str]


def fault_of(name: str, encoding: str = "utf-8") -> str:
    with pytest.raises(UserError) as caught:
        _ = read_file(name, encoding).rows
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_rows(write_rows: WriteRows, kind: str, packing: str) -> None:
    if kind == "parquet" and packing:
        pytest.skip("Parquet is compressed inside")
    path = write_rows(f"a.{kind}{packing}", ROWS)
    table = read_file(path)
    assert table.rows.to_list() == ROWS
    assert table.name == path


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("kind", TEXT_FORMATS)
def test_gb18030_with_its_encoding(write_rows: WriteRows, kind: str, packing: str) -> None:
    rows = [{"文本": "好", "标签": "坏"}, {"文本": "很好，𠀀", "标签": "好"}]
    assert read_file(write_rows(f"a.{kind}{packing}", rows, "gb18030"), "gb18030").rows.to_list() == rows


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("kind", TEXT_FORMATS)
def test_gb18030_without_its_encoding_names_the_line_and_the_encoding(
    write_rows: WriteRows, kind: str, packing: str
) -> None:
    rows = [{"text": "plain", "label": "x"}, {"text": "很好", "label": "y"}]
    path = write_rows(f"a.{kind}{packing}", rows, "gb18030")
    fault = fault_of(path)
    line = {"csv": 3, "tsv": 3, "json": 1, "jsonl": 2}[kind]
    assert f"{path}, line {line}, byte " in fault
    assert "--encoding gb18030" in fault


@pytest.mark.parametrize("kind", TEXT_FORMATS)
def test_utf8_read_as_gb18030_names_utf8(write_rows: WriteRows, kind: str) -> None:
    path = write_rows(f"a.{kind}", [{"text": "好a", "label": "坏b"}, {"text": "差", "label": "c"}])
    fault = fault_of(path, "gb18030")
    assert path in fault
    assert "--encoding utf-8" in fault


def test_utf16_names_its_encoding_and_reads_with_it(write_rows: WriteRows) -> None:
    rows = [{"text": "好a", "label": "坏"}]
    path = write_rows("a.csv", rows, "utf-16")
    assert "--encoding utf-16" in fault_of(path)
    assert read_file(path, "utf-16").rows.to_list() == rows


def test_bytes_of_no_encoding_name_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"text,label\nok,x\n\xff\xff\xff\xff,y\n")
    assert f"{path}, line 3" in fault_of(path)


def test_an_encoding_python_does_not_know(write_rows: WriteRows) -> None:
    assert "--encoding gbk8" in fault_of(write_rows("a.csv", ROWS), "gbk8")


@pytest.mark.parametrize("kind", TEXT_FORMATS)
def test_a_byte_order_mark_is_no_part_of_the_first_column(write_rows: WriteRows, kind: str) -> None:
    assert read_file(write_rows(f"a.{kind}", ROWS, "utf-8-sig")).rows.column_names == ["text", "label"]


@pytest.mark.parametrize("kind", FORMATS)
def test_words_that_look_like_nothing_survive(write_rows: WriteRows, kind: str) -> None:
    texts = ["null", "NA", "None", "nan", "N/A", "NULL", "-", "ok"]
    rows = [{"text": text, "label": text} for text in texts]
    table = read_file(write_rows(f"a.{kind}", rows))
    assert table.rows["text"][:] == texts
    assert table.rows["label"][:] == texts


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_cells_stay_as_they_are_written(write_rows: WriteRows, kind: str) -> None:
    """A reader that guesses types turns `01` into 1, `true` into True and `1.50` into 1.5, in one file and,
    where another row is no number, not in the next one."""
    rows = [{"text": "007", "label": "01"}, {"text": "1.50", "label": "02"}, {"text": "1e3", "label": "true"}]
    for name, part in (("all", rows), ("two", rows[:2]), ("last", rows[2:])):
        found = read_file(write_rows(f"{name}.{kind}", part)).rows
        assert [str(text) for text in found["text"]] == [row["text"] for row in part]
        assert [str(label) for label in found["label"]] == [row["label"] for row in part]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_texts_that_look_like_dates_stay_texts(write_rows: WriteRows, kind: str) -> None:
    rows = [{"text": "2020-01-01", "label": "a"}, {"text": "2020-01-02", "label": "b"}]
    assert [str(text) for text in read_file(write_rows(f"a.{kind}", rows)).rows["text"]] == ["2020-01-01", "2020-01-02"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.csv.gz", "a.parquet"])
def test_a_missing_file_names_its_neighbour(tmp_path: Path, name: str) -> None:
    (tmp_path / name.replace("a.", "aa.")).touch()
    fault = fault_of(str(tmp_path / name))
    assert f"{tmp_path / name} does not exist (did you mean aa." in fault


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert "is a folder" in fault_of(str(tmp_path))


@pytest.mark.parametrize("name", ["a.txt", "a", "a.csv.zip", "a.xlsx", "a.gz"])
def test_unknown_endings_list_the_known_ones(tmp_path: Path, name: str) -> None:
    fault = fault_of(write(tmp_path / name, "text,label\na,1\n"))
    assert name in fault
    assert all(f".{kind}" in fault for kind in FORMATS)


NO_ROWS, BROKEN = ("empty", "no rows", "no columns"), ("",)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "", NO_ROWS), ("a.csv", "\n", NO_ROWS), ("a.csv", "text,label\n", NO_ROWS),
        ("a.tsv", "text\tlabel\n", NO_ROWS), ("a.json", "[]", NO_ROWS), ("a.json", "", NO_ROWS),
        ("a.jsonl", "\n", NO_ROWS), ("a.json", "{", BROKEN), ("a.jsonl", '{"text":"a"}\n{"text":\n', BROKEN),
        ("a.parquet", "abc", BROKEN), ("a.csv.gz", "not gzip", BROKEN), ("a.csv", 'text,label\n"a,1\nb,2\n', BROKEN),
    ],
)  # fmt: skip
def test_files_without_rows_and_broken_ones_are_named(
    tmp_path: Path, name: str, content: str, said: tuple[str, ...]
) -> None:
    fault = fault_of(write(tmp_path / name, content))
    assert str(tmp_path / name) in fault
    assert any(word in fault for word in said)


@pytest.mark.parametrize("value", [["b", 1], 10**30])
def test_a_field_of_mixed_kinds_names_its_row(write_rows: WriteRows, value: object) -> None:
    first = [1] if isinstance(value, list) else 1
    path = write_rows("a.jsonl", [{"text": "a", "label": first}, {"text": "b", "label": value}])
    assert f"{path}, row 2" in fault_of(path)


def test_a_quote_at_the_start_of_a_cell_does_not_swallow_the_next_rows(tmp_path: Path) -> None:
    """TSV files are often written without quoting: three rows, or an error, and never one."""
    path = write(tmp_path / "a.tsv", 'text\tlabel\n"good film\t1\nbad film\t0\n"ok film\t1\n')
    try:
        rows = read_file(path).rows
    except UserError as error:
        assert path in str(error)  # noqa: PT017
    else:
        assert len(rows) == 3


def test_a_json_file_written_by_columns(tmp_path: Path) -> None:
    """As pandas' `to_json` does by default: its two rows, or an error, and never one row of objects."""
    content = '{"text": {"0": "good", "1": "bad"}, "label": {"0": "x", "1": "y"}}'
    path = write(tmp_path / "a.json", content)
    try:
        rows = read_file(path).rows
    except UserError as error:
        assert path in str(error)  # noqa: PT017
    else:
        assert rows.to_list() == [{"text": "good", "label": "x"}, {"text": "bad", "label": "y"}]


def quoted(opening: str, closing: str) -> str:
    rows = [f"text {number},{number % 2}" for number in range(200)]
    rows[40], rows[169] = opening, closing
    return "text,label\n" + "".join(f"{row}\n" for row in rows)


@pytest.mark.parametrize(
    ("closing", "said"),
    [
        ('the film " was good,1', "closes amid text on line 171"),
        ('said "yes",1', "closes amid text on line 171"),
        ("none at all,1", "is never closed"),
        ('a screen of 5",0', "takes in the rows up to line 171"),  # sound CSV, but for the labels within
    ],
)
def test_a_quote_that_is_not_closed_loses_no_rows(tmp_path: Path, closing: str, said: str) -> None:
    fault = fault_of(write(tmp_path / "a.csv", quoted('"a text of its own,1', closing)))
    assert "line 42 (row 41): a double quote that begins a cell" in fault
    assert said in fault


def test_texts_of_several_lines_are_no_fault(tmp_path: Path) -> None:
    letter = "Dear John,\r\nthanks,\n\nBob"
    path = write(tmp_path / "a.csv", quoted(f'"{letter}",1', '"5"" screen",0'))
    rows = read_file(path).rows
    assert (len(rows), rows["text"][40], rows["text"][169]) == (200, letter, '5" screen')


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "text,label,text\na,1,b\n", "more than one column 'text'"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": "b", "label": 1, "label": 0}\n',
            "line 2: not JSON (the key 'label'",
        ),
        ("a.json", '[{"text": "a", "text": "b"}]', "the key 'text' stands twice"),
        ("a.csv", "te\0xt,label\na,1\n", "the column name 'te\\x00xt' is no text"),
        ("a.jsonl", '{"te\\ud800xt": "a"}\n', "the column name 'te\\ud800xt' is no text"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b\\ud83d"}\n', "row 2: field 'text' is 'b\\ud83d', which holds half a"),
        ("a.json", '{"text": ' + "[" * 200 + "]" * 200 + "}", "nested deeper than a table can hold"),
        ("a.json", '{"text": ' + "[" * 10**5 + "]" * 10**5 + "}", "recursion"),
        ("a.jsonl", '{"text": ' + "[" * 10**5 + "]" * 10**5 + "}\n", "line 1: not JSON"),
    ],
)
def test_what_no_table_can_hold_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    fault = fault_of(write(tmp_path / name, content))
    assert fault.startswith(str(tmp_path / name))
    assert said in fault


def test_nul_in_a_text_and_a_long_document_are_kept(tmp_path: Path) -> None:
    long = "a" * 200_000
    assert read_file(write(tmp_path / "a.csv", f"text,label\na\0b,1\n{long},0\n")).rows["text"][:] == ["a\0b", long]


@pytest.mark.parametrize("rest", ["plain text\n" * 5, "很好\n" * 5])
def test_one_bad_byte_is_named_and_is_no_other_encoding(tmp_path: Path, rest: str) -> None:
    path = write(tmp_path / "a.csv", b"text\n" + rest.encode() + b"caf\xe9 au lait\nfine\n")
    fault = fault_of(path)
    assert f"{path}, line 7, byte {len(rest.encode()) + 9} of the file: not utf-8 (0xe9); 1 such place" in fault
    assert "--encoding" not in fault


@pytest.mark.parametrize("packing", [gzip, bz2, lzma])
def test_a_file_that_unpacks_to_all_memory(tmp_path: Path, packing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.csv.{ {gzip: 'gz', bz2: 'bz2', lzma: 'xz'}[packing] }"
    path.write_bytes(packing.compress(b"text,label\n" + b"good,1\n" * 30_000))
    assert len(read_file(str(path)).rows) == 30_000
    monkeypatch.setattr(parse, "_UNPACKED_BYTES", 100_000)
    assert "becomes more than 100 kB unpacked" in (fault := fault_of(str(path)))
    assert "TOOLKIT_MAX_UNPACKED_BYTES" in fault
    monkeypatch.setenv("TOOLKIT_MAX_UNPACKED_BYTES", "300000")
    assert len(read_file(str(path)).rows) == 30_000


def test_a_parquet_file_that_unpacks_to_all_memory(
    tmp_path: Path, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows("a.parquet", [{"text": "good " * 100}] * 20_000)
    assert len(read_file(path).rows) == 20_000
    monkeypatch.setenv("TOOLKIT_MAX_UNPACKED_BYTES", "1000000")
    assert "becomes more than 1 MB unpacked" in fault_of(path)


def test_a_row_with_too_many_cells_names_the_line(tmp_path: Path) -> None:
    assert "line 3" in fault_of(write(tmp_path / "a.csv", "text,label\na,1\nb,c,2\nd,3\n"))


def test_a_comma_too_many_in_every_row_does_not_shift_the_columns(tmp_path: Path) -> None:
    """`good, but dull,1` without quotes: the first cell is not an index."""
    fault = fault_of(write(tmp_path / "a.csv", "text,label\ngood, but dull,1\nbad, but short,0\n"))
    assert str(tmp_path / "a.csv") in fault


def test_a_changed_file_is_read_again_though_its_time_and_size_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text in ("old", "new"):  # as `rsync --times` or `git checkout` in one second leave it
        write(path, f"text,label\n{text},1\n")
        os.utime(path, (10**9, 10**9))
        table = read_file(str(path))
        assert table.rows["text"][0] == text


def test_a_folder_of_splits(write_rows: WriteRows, tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_rows(f"{name}.csv", ROWS)
    splits = read_hub(str(tmp_path))
    assert sorted(splits) == ["test", "train"]
    assert splits["train"].rows.to_list() == ROWS
    assert splits["train"].name == f"{tmp_path} (train)"


def test_a_folder_is_known_by_its_content(write_rows: WriteRows, tmp_path: Path, toolkit_cache: Path) -> None:
    (tmp_path / "data").mkdir()
    path = write_rows("data/train.csv", ROWS)
    first = read_hub(str(tmp_path / "data"))["train"]
    os.utime(path, (10**9, 10**9))
    shutil.copytree(tmp_path / "data", tmp_path / "cloned")
    digests = {read_hub(str(tmp_path / name))["train"].digest for name in ("data", "cloned")}
    assert digests == {first.digest}
    write_rows("data/train.csv", [row | {"label": "z"} for row in ROWS])  # as large, and of the same time
    os.utime(path, (10**9, 10**9))
    changed = read_hub(str(tmp_path / "data"))["train"]
    assert changed.digest != first.digest
    assert changed.rows["label"][0] == "z"


def test_a_data_set_that_is_not_there_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dataset_name"):
        read_hub(str(tmp_path / "nowhere"))


def table_of(*columns: str) -> Table:
    return Table(datasets.Dataset.from_dict({column: ["a"] for column in columns}), "f.csv", "d")


@pytest.mark.parametrize(("wanted", "meant"), [("txet", "text"), ("评论内熔", "评论内容")])
def test_a_misspelt_column_names_the_nearest_all_and_the_setting(wanted: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        find_column(table_of("text", "评论内容", "b"), wanted, (), "text_column")
    for part in ("f.csv", repr(wanted), f"did you mean {meant}?", "text, 评论内容, b", "--text_column"):
        assert part in str(caught.value)
