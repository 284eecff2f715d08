"""toolkit/data/read.py, text_files.py, json_files.py: files -> tables, with errors that name the file and the row."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from tests.faults import Fault, refusal
from toolkit.config import TextSettings
from toolkit.data import json_files, read, table, text_files
from toolkit.data.read import read_file as read_with
from toolkit.data.read import read_hub
from toolkit.data.table import Table

FORMATS = ["csv", "tsv", "json", "jsonl", "parquet"]
TEXT_FORMATS = ["csv", "tsv", "json", "jsonl"]
ROWS = [
    {"text": 'a, "b"', "label": "x"},
    {"text": "很好\tc", "label": "y"},
    {"text": "d", "label": "x"},
]

WriteRows = Callable[..., str]


def read_file(name: str, encoding: str = "utf-8", **options: Any) -> Table:
    return read_with(name, TextSettings(encoding=encoding, **options))


def fault_of(name: str, encoding: str = "utf-8", **options: Any) -> str:
    said = refusal(lambda: read_file(name, encoding, **options).rows)
    assert said.startswith(("--", name))
    return said


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.fixture(autouse=True, params=["at once", "in batches, kept in the cache"])
def _as_large_files_are(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, toolkit_cache: Path
) -> None:
    """Every test runs a second time in batches, as large files are read."""
    if request.param != "at once":
        for module in (table, text_files, read):
            monkeypatch.setattr(module, "BATCH_ROWS", 50)
        monkeypatch.setattr(read, "IN_MEMORY_BYTES", -1)


@pytest.mark.parametrize("kind", [*FORMATS, *(f"{kind}.gz" for kind in TEXT_FORMATS)])
def test_every_format_gives_the_same_rows(write_rows: WriteRows, kind: str) -> None:
    texts = ["null", "NA", "None", "nan", "N/A", "-", "007", "1.50", "1e3", "true", "2020-01-01"]
    rows = [*ROWS, *({"text": text, "label": text} for text in texts)]
    path = write_rows(f"a.{kind}", rows)
    table = read_file(path)
    assert (table.rows.to_list(), table.name) == (rows, path)
    found = read_file(write_rows(f"b.{kind}", rows[-5:-1])).rows  # and where no other row is a text
    assert found.to_list() == rows[-5:-1]


@pytest.mark.parametrize("kind", [*TEXT_FORMATS, "csv.gz", "jsonl.gz"])
def test_encodings(write_rows: WriteRows, kind: str) -> None:
    rows = [{"text": "plain", "label": "x"}, {"text": "很好，𠀀", "label": "坏b"}]
    gbk, utf8 = write_rows(f"a.{kind}", rows, "gb18030"), write_rows(f"b.{kind}", rows)
    assert read_file(gbk, "gb18030").rows.to_list() == rows
    line = {"csv": 3, "tsv": 3, "json": 1, "jsonl": 2}[kind.split(".")[0]]
    assert f"{gbk}, line {line}, byte " in (fault := fault_of(gbk))
    assert "not utf-8" in fault
    assert "pass --encoding gb18030" in fault
    assert "pass --encoding utf-8" in fault_of(utf8, "gb18030")
    marked = write_rows(f"c.{kind}", rows, "utf-8-sig")
    assert read_file(marked).rows.column_names == ["text", "label"]
    assert "byte order mark" in fault_of(marked, "gb18030")
    assert "pass --encoding gb18030" in fault_of(gbk, "gb2312")


def test_utf16_names_its_encoding_and_reads_with_it(write_rows: WriteRows) -> None:
    path = write_rows("a.csv", ROWS, "utf-16")
    assert "--encoding utf-16" in fault_of(path)
    assert read_file(path, "utf-16").rows.to_list() == ROWS
    assert "--encoding gbk8" in fault_of(path, "gbk8")
    marked = write_rows("b.csv", [{"\ufefftext": "很好", "label": "x"}], "gb18030")
    assert read_file(marked, "gb18030").rows.to_list() == [{"text": "很好", "label": "x"}]


@pytest.mark.parametrize("rest", ["plain text\n" * 5, "很好\n" * 5])
def test_one_bad_byte_is_named_and_is_no_other_encoding(tmp_path: Path, rest: str) -> None:
    path = write(tmp_path / "a.csv", b"text\n" + rest.encode() + b"caf\xe9 au lait\nfine\n")
    fault = fault_of(path)
    assert (
        f"{path}, line 7, byte {len(rest.encode()) + 9} of the file: not utf-8 (0xe9); 1 such place"
        in fault
    )
    assert "--encoding" not in fault


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.csv.gz", "a.parquet"])
def test_a_missing_file_names_its_neighbour(tmp_path: Path, name: str) -> None:
    (tmp_path / name.replace("a.", "aa.")).touch()
    assert "does not exist (did you mean aa." in fault_of(str(tmp_path / name))
    assert "is a folder" in fault_of(str(tmp_path))
    os.mkfifo(tmp_path / "pipe.csv")
    assert "pipe.csv is a pipe" in fault_of(str(tmp_path / "pipe.csv"))


@pytest.mark.parametrize("name", ["a.md", "a", "a.csv.zip", "a.xlsx", "a.gz"])
def test_unknown_endings_list_the_known_ones(tmp_path: Path, name: str) -> None:
    fault = fault_of(write(tmp_path / name, "text,label\na,1\n"))
    assert all(f".{kind}" in fault for kind in FORMATS)
    assert ("save it as `CSV UTF-8`" in fault) == (name == "a.xlsx")


DEEP = '{"text": ' + "[" * 10**5 + "]" * 10**5 + "}"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "\n", "holds no columns"),
        ("a.csv", "text,label\n", "has a header and no rows"),
        ("a.tsv", "text\tlabel\n", "has a header and no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.json", "\n", "is empty"),
        ("a.jsonl", "\n", "has no rows"),
        ("a.json", "{", "not JSON"),
        ("a.jsonl", '{"text":"a"}\n{"text":\n', "line 2: not JSON"),
        ("a.parquet", "abc", "cannot be read as parquet"),
        ("a.csv.gz", "not gzip", "is not a whole .gz file"),
        ("a.csv", "text,label\na,1\nb,c,2\nd,3\n", "line 3: 3 cells where the header has 2"),
        ("a.csv", "text,label\na,1\ntext,label\nd,3\n", "line 3 repeats the header"),  # `cat a.csv b.csv`
        ("a.csv", "text,label\na,1\n\ufefftext,label\nd,3\n", "line 3 repeats the header"),
        ("a.csv", 'text;label\n"a";1\n', "'text;label' is one cell: pass --delimiter ';'"),
        ("a.csv", "text\tlabel\na, or b\t1\n", "is one cell: pass --delimiter tab"),
        ("a.tsv", "text,label\na\tb,1\n", "is one cell: pass --delimiter ','"),
        ("a.csv", "\ufeffsep=;\ntext;label\na;1\n", "line 1: remove this line for Excel (sep=)"),
        ("a.csv", "sep=,\ntext,label\na,1\n", "line 1: remove this line for Excel (sep=)"),
        # no cell is an index
        ("a.csv", "text,label\ngood, but dull,1\nbad, but short,0\n", "line 2: 3 cells where the header has 2"),
        ("a.csv", "text,label,text\na,1,b\n", "more than one column 'text'"),
        ("a.csv", "te\0xt,label\na,1\n", "the column name 'te\\x00xt' is no text"),
        ("a.json", '[{"text": "a", "text": "b"}]', "the key 'text' occurs twice"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "label": 1, "label": 0}\n', "line 2: not JSON (the key 'label'"),
        ("a.jsonl", '{"te\\ud800xt": "a"}\n', "the column name 'te\\ud800xt' is no text"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b\\ud83d"}\n', "row 2: field 'text' is 'b\\ud83d', which holds half a"),
        ("a.jsonl", "{}\n" * 3000 + '{"text": "a"}\n', ": objects without fields"),
        ("a.jsonl", '{"label": [1]}\n{"label": ["b", 1]}\n', "row 2: field 'label' is"),
        ("a.jsonl", f'{{"label": 1}}\n{{"label": {10**30}}}\n', "row 2: field 'label' is"),
        ("a.jsonl", '{"text": ' + "[" * 200 + "]" * 200 + "}", "nested deeper than a table can hold"),
        ("a.json", DEEP, "not JSON ("),  # Python 3.14 names a stack overflow, earlier ones the recursion limit
        ("a.jsonl", f"{DEEP}\n", "line 1: not JSON"),
        # as pandas' `to_json` does by default
        ("a.json", '{"text": {"0": "good", "1": "bad"}, "label": {"0": "x", "1": "y"}}', "written by columns"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_garbage_collection")
def test_invalid_files_are_named(
    tmp_path: Path, name: str, content: str, said: str, fault: Fault
) -> None:
    told = fault_of(write(tmp_path / name, content))
    assert said in told
    fault(f"bad {name}: {said.strip(' :(')}", told)


def quoted(opening: str, closing: str, separator: str = ",") -> str:
    rows = [f"text {number}{separator}{number % 2}" for number in range(200)]
    rows[40], rows[169] = opening, closing
    return f"text{separator}label\n" + "".join(f"{row}\n" for row in rows)


@pytest.mark.parametrize(("kind", "separator"), [("csv", ","), ("tsv", "\t")])
@pytest.mark.parametrize(
    ("closing", "said"),
    [
        ('the film " was good{}1', "is followed by more text on line 171"),
        ('said "yes"{}1', "is followed by more text on line 171"),
        ('"another{}1', "is followed by more text on line 171"),
        ("none at all{}1", "is never closed"),
        (
            'a screen of 5"{}0',
            "takes in the rows up to line 171",
        ),  # sound CSV, but for the labels within
    ],
)
def test_an_unclosed_quote(
    tmp_path: Path, kind: str, separator: str, closing: str, said: str, fault: Fault
) -> None:
    content = quoted(f'"a text of its own{separator}1', closing.format(separator), separator)
    told = fault_of(write(tmp_path / f"a.{kind}", content))
    assert "line 42 (row 41): a double quote that begins a cell" in told
    assert said in told
    fault(f"a stray quote in a {kind} file that {said}", told)


def test_texts_of_several_lines_and_odd_rows_are_no_fault(tmp_path: Path) -> None:
    letter, long = "Dear John,\r\nthanks,\n\nBob", "a" * 200_000
    content = quoted(f'"{letter}",1', '"5"" screen",0') + f"a\0b,1\n\n  \nshort\n{long},0\n"
    rows = read_file(write(tmp_path / "a.csv", content)).rows
    assert (len(rows), rows["text"][40], rows["text"][169]) == (203, letter, '5" screen')
    assert rows[200:] == {"text": ["a\0b", "short", long], "label": ["1", "", "0"]}


def test_a_quote_that_is_part_of_a_text_names_the_row_and_both_ways_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'text\tlabel\n"very good" film\t1\nbad\t0\n"so\t1\n')
    told = fault_of(path)
    assert "line 2 (row 1)" in told
    assert "pass --quoting none; else close it at the end of the cell, or double it" in told
    table = read_file(path, quoting="none")
    assert list(table.rows["text"]) == ['"very good" film', "bad", '"so']
    assert table.note == f"{path}: read with --quoting none: double quotes are part of the texts"
    assert table.digest != read_file(path).digest
    commas = write(tmp_path / "a.csv", 'text,label\n"a, b",1\n')
    assert "line 2: 3 cells where the header has 2: pass --quoting csv" in fault_of(
        commas, quoting="none"
    )


@pytest.mark.parametrize(
    ("name", "content", "options", "columns", "said"),
    [
        (
            "a.csv",
            "text|label\na,b|1\n",
            {"delimiter": "|"},
            {"text": ["a,b"], "label": ["1"]},
            "with --delimiter |",
        ),
        (
            "a.txt",
            "text\tlabel\na\t1\n",
            {"delimiter": "tab"},
            {"text": ["a"], "label": ["1"]},
            "--delimiter tab",
        ),
        (
            "a.csv",
            "a,1\n\nb,0\n",
            {"column_names": "text, y"},
            {"text": ["a", "b"], "y": ["1", "0"]},
            "--column_names",
        ),
        ("a.txt", "a, 'b\n\n c\r\n", {}, {"text": ["a, 'b", "", " c"]}, "one text per line"),
        (
            "a.json",
            '[["a", 1], ["b", 0]]',
            {},
            {"text": ["a", "b"], "label": [1, 0]},
            "rows [text, label], lists",
        ),
        (
            "a.json",
            '[["x", "a"], ["x", "b"]]',
            {},
            {"label": ["x", "x"], "text": ["a", "b"]},
            "rows [label, text]",
        ),
        (
            "a.jsonl",
            '["a", "b", 1]\n',
            {},
            {"1": ["a"], "2": ["b"], "3": [1]},
            "rows [1, 2, 3], lists",
        ),
        ("a.json", '[["a", 1]]', {"column_names": "q,y"}, {"q": ["a"], "y": [1]}, "rows [q, y]"),
        ("a.csv", "text,label\na,1\n", {}, {"text": ["a"], "label": ["1"]}, ""),
        # settings of other formats
        ("a.jsonl", '{"q": "a"}', {"column_names": "b"}, {"q": ["a"]}, "without --column_names b"),
        (
            "a.jsonl",
            '["a", 1]',
            {"delimiter": ";"},
            {"text": ["a"], "label": [1]},
            "without --delimiter ;",
        ),
        (
            "a.csv",
            "text\na\n",
            {"sample_by": "paragraph"},
            {"text": ["a"]},
            "without --sample_by paragraph",
        ),
        (
            "a.txt",
            "a\n",
            {"column_names": "b"},
            {"text": ["a"]},
            "one text per line; without --column_names b",
        ),
    ],
)
def test_files_as_they_come(
    tmp_path: Path, name: str, content: str, options: Any, columns: Any, said: str
) -> None:
    table = read_file(path := write(tmp_path / name, content), **options)
    assert table.rows.to_dict() == columns
    assert said in table.note
    assert table.note.startswith(path if said else "")


def test_ways_to_read_that_cannot_be_meant(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,1\n")
    assert "--delimiter '||': give one character" in fault_of(path, delimiter="||")
    assert "line 1: 2 cells where" in fault_of(path, column_names="a")
    assert "line 1 names the columns as --column_names does" in fault_of(
        path, column_names="text,label"
    )
    returns = 'text,label\n"a\rb\n",1\na\rb,1\n'
    assert "line 5: a lone carriage return" in fault_of(write(tmp_path / "r.csv", returns))
    assert len(read_file(write(tmp_path / "n.csv", "text,label\n\ra,1\n\rb,0\n\r"))) == 2
    one = read_file(write(tmp_path / "b.csv", "text;label\na;1\n"))
    refusal(one.text_column, None, says=["'text;label': pass --delimiter ';', or --column_names"])
    assert one.text_column("text;label") == "text;label"
    assert read_file(write(tmp_path / "c.csv", '"a, b"\nc\n')).text_column(None) == "a, b"


@pytest.mark.parametrize("packing", [gzip, bz2, lzma])
def test_a_file_that_unpacks_to_all_memory(
    tmp_path: Path, packing: Any, monkeypatch: pytest.MonkeyPatch, toolkit_cache: Path, fault: Fault
) -> None:
    path = tmp_path / f"a.csv.{ {gzip: 'gz', bz2: 'bz2', lzma: 'xz'}[packing] }"
    path.write_bytes(packing.compress(b"text,label\n" + b"good,1\n" * 10_000))
    assert len(read_file(str(path)).rows) == 10_000
    shutil.rmtree(toolkit_cache / "rows", ignore_errors=True)
    monkeypatch.setattr(text_files, "_UNPACKED_BYTES", 40_000)
    told = fault_of(str(path))
    assert "becomes more than 40 kB unpacked" in told
    assert "TOOLKIT_MAX_UNPACKED_BYTES" in told
    monkeypatch.setenv("TOOLKIT_MAX_UNPACKED_BYTES", "100000")
    assert len(read_file(str(path)).rows) == 10_000
    fault(f"a bomb packed with {packing.__name__}", told)


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_columns_and_types_that_later_rows_bring(write_rows: WriteRows, kind: str) -> None:
    rows: list[dict[str, Any]] = [
        {"number": place, "list": [], "text": None} for place in range(200)
    ]
    rows[120] |= {"number": 1.5, "list": ["a"], "text": "t"}
    rows[180] |= {"late": True}
    read = read_file(write_rows(f"a.{kind}", rows)).rows.to_list()
    assert read == [
        {**row, "number": float(row["number"]), "late": row.get("late")} for row in rows
    ]
    rows[150]["number"] = "many"
    fault = fault_of(write_rows(f"b.{kind}", rows))
    assert "row 151: field 'number' is 'many', unlike the rows before it" in fault
    rows[150] = rows[10] | {"list": 1}
    assert "row 151: field 'list' is '1'" in fault_of(write_rows(f"c.{kind}", rows))


def test_rows_come_in_batches_with_their_numbers(write_rows: WriteRows) -> None:
    rows = [{"text": f"t {place}", "label": str(place)} for place in range(230)]
    table = read_file(write_rows("a.csv", rows))
    wanted = np.array([0, 3, 49, 50, 149, 229])
    found = [(number, *cells) for numbers, columns in table.cells(["label", "text"], wanted)
             for number, *cells in zip(numbers.tolist(), *columns, strict=True)]  # fmt: skip
    assert found == [(number, str(number), f"t {number}") for number in wanted.tolist()]
    assert sum(len(numbers) for numbers, _ in table.cells(["text"])) == 230


def test_several_files_are_one_table(write_rows: WriteRows, tmp_path: Path) -> None:
    paths = [write_rows(f"part-{number}.csv.gz", [{"text": f"{number} {row}", "label": "x"} for row in range(60)])
             for number in (10, 9)]  # fmt: skip
    pattern = str(tmp_path / "part-*.csv.gz")
    table = read_file(pattern)
    assert table.rows["text"][:] == [f"{number} {row}" for number in (9, 10) for row in range(60)]
    assert (table.name, table.where(0), table.where(119)) == (
        pattern,
        f"{paths[1]}, row 1",
        f"{paths[0]}, row 60",
    )
    assert (table.listing([0, 59]), table.listing([119])) == (
        f"{paths[1]}, row 1, {paths[1]}, row 60",
        f"{paths[0]}, row 60",
    )
    assert table.digest != read_file(paths[0]).digest
    write_rows("part-11.csv.gz", [{"text": "a", "other": "x"}])
    refusal(
        lambda: read_file(pattern).rows,
        match=r"part-11.csv.gz has the columns text, other, and .* text, label",
    )
    refusal(read_file, str(tmp_path / "nothing-*.csv"), match="no file has such a name")


def test_splits_under_other_names_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    tables = {
        split: Table(rows, f"mnli ({split})", split) for split in ("train", "validation_matched")
    }
    monkeypatch.setattr(read, "read_hub", lambda *_: tables)
    ((split, train),) = read.read_tables(TextSettings(dataset_name="mnli")).items()
    assert (split, train.note) == (
        "train",
        "mnli (train): its splits validation_matched are not used",
    )


def test_files_with_other_orders_of_class_names(tmp_path: Path) -> None:
    for number, names in enumerate((["a", "b"], ["a", "b"], ["b", "a"])):
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
        )
        rows = datasets.Dataset.from_dict({"text": ["t"], "label": [0]}, features=features)
        rows.to_parquet(tmp_path / f"{number}.parquet")
    assert read_file(str(tmp_path / "[01].parquet")).rows["label"][:] == [0, 0]
    refusal(
        lambda: read_file(str(tmp_path / "*.parquet")).rows,
        match="2.parquet: its class names, or their order",
    )


@pytest.mark.parametrize("characters", [1, 2, 5, 1 << 20])
def test_a_list_of_json_is_read_as_a_stream(
    tmp_path: Path, characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "_JSON_CHARACTERS", characters)
    rows = [
        {"text": 'a "b], [" \\', "label": 12.5e3, "deep": [1, {"c": []}]},
        ["x", -1, None],
        17,
        "é\n",
        True,
        {},
    ]
    for indent in (None, 2):
        path = Path(write(tmp_path / "a.json", " \n" + json.dumps(rows, indent=indent) + "\n "))
        assert read._read_entries(path) == rows
    for text in (
        '[{"text": "a"}, {"text": "b"}',
        '[{"text": "a"},]',
        '[{"text": "a"}] [1]',
        '[{"text": "a"} 1]',
    ):
        refusal(
            read._read_entries, Path(write(tmp_path / "a.json", text)), match=r"a\.json: not JSON"
        )
    stream = io.StringIO(json.dumps(rows * 1000))
    if characters < 10:
        assert next(json_files._stream_items(stream)) == rows[0]
        assert stream.tell() < 200


def test_a_changed_file_is_read_again_though_its_time_and_size_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text in ("old", "new"):  # as `rsync --times` or `git checkout` in one second leave it
        write(path, f"text,label\n{text},1\n")
        os.utime(path, (10**9, 10**9))
        table = read_file(str(path))
        assert table.rows["text"][0] == text


def test_the_same_bytes_in_another_place_and_format(tmp_path: Path) -> None:
    """The cache knows rows by their content and format; a file is named by where it lies now."""
    paths = [write(tmp_path / name, "text\tlabel\na\t1\n") for name in ("a.csv", "b.csv", "a.tsv")]
    comma, copy, tab = map(read_file, paths)
    assert [table.rows.column_names for table in (comma, copy, tab)] == [["text\tlabel"]] * 2 + [
        ["text", "label"]
    ]
    assert [table.where(0) for table in (comma, copy, tab)] == [f"{path}, row 1" for path in paths]
    assert comma.digest == copy.digest != tab.digest
    assert (
        read_file(paths[0], column_names="line").digest != comma.digest
    )  # `line` is a value of --sample_by, too


def test_a_folder_is_known_by_its_content(
    write_rows: WriteRows, tmp_path: Path, toolkit_cache: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path, _ = write_rows("data/train.csv", ROWS), write_rows("data/test.csv", ROWS)
    first = read_hub(str(folder))["train"]
    assert (first.name, first.rows.to_list()) == (f"{folder} (train)", ROWS)
    os.utime(path, (10**9, 10**9))
    shutil.copytree(folder, tmp_path / "cloned")
    digests = {read_hub(str(tmp_path / name))["train"].digest for name in ("data", "cloned")}
    assert digests == {first.digest}
    write_rows(
        "data/train.csv", [row | {"label": "z"} for row in ROWS]
    )  # as large, and of the same time
    os.utime(path, (10**9, 10**9))
    changed = read_hub(str(folder))["train"]
    assert changed.digest != first.digest
    assert changed.rows["label"][0] == "z"
    refusal(read_hub, str(tmp_path / "nowhere"), match="--dataset_name")
