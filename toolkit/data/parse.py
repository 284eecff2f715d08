"""One file -> an Arrow table, with errors that name the line or the row.

Cells of CSV and TSV stay as they are written: a reader that guesses types makes `01` a number in one file
and a text in the next, `null` nothing, and a column's meaning dependent on its other rows.
"""

from __future__ import annotations

import bisect
import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import TextSettings
from toolkit.errors import UserError, first_line, listing
from toolkit.units import size_text

if TYPE_CHECKING:
    import pyarrow

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNPACKED_BYTES, _UNPACKED_RATIO = 1 << 30, 100
"""A packed file may become so many bytes, or so many times its size if that is more; texts become 3 to 20 times it."""
_LIKELY_ENCODINGS = ("utf-8", "gb18030", "big5")
_UNFIT = (ValueError, TypeError, NotImplementedError, OverflowError, RecursionError)  # pyarrow's errors are of these
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")


def format_of(path: Path) -> str:
    """`reviews.csv.gz` -> `.csv`. Raises UserError for an ending no reader knows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _OPEN:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise UserError(f"{path}: cannot tell its format: name it {', '.join(FORMATS)} (also with .gz after it)")
    return suffixes[-1]


def parse_file(path: Path, settings: TextSettings) -> tuple[pyarrow.Table, str]:
    """(the rows of a whole file, a line on how it was read where that is worth one). Raises UserError when it is
    broken, holds no rows or is encoded otherwise."""
    kind, said = format_of(path), ""
    content = _bytes_of(path)
    if kind == ".parquet":
        table = _parquet(path, content)
    else:
        text = _decoded(path, content, settings.encoding)
        if kind in _DELIMITERS or (kind == ".txt" and settings.delimiter):
            table, said = _separated(path, text, settings, _separator(settings, kind))
        elif kind == ".txt":
            table, said = _lines(text), f"{path}: one text per line"
        else:
            table, said = _records(path, _json_lines(path, text) if kind == ".jsonl" else _json(path, text), settings)
    if table.num_rows == 0:
        raise UserError(f"{path} has a header and no rows" if kind in _DELIMITERS else f"{path} holds no rows")
    return table, said


def read_json(path: Path) -> list[Any]:
    """The entries of a JSON or JSONL file, or the lines of a text."""
    kind, text = format_of(path), _decoded(path, _bytes_of(path), "utf-8")
    if kind in (".json", ".jsonl"):
        return _json_lines(path, text) if kind == ".jsonl" else _json(path, text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _most_bytes(path: Path) -> int:
    """What a packed file may become: memory for more is more likely a trap than data."""
    asked = os.environ.get("TOOLKIT_MAX_UNPACKED_BYTES", "")
    return int(asked) if asked.isdecimal() else max(_UNPACKED_BYTES, _UNPACKED_RATIO * path.stat().st_size)


def _too_large(path: Path, most: int) -> UserError:
    return UserError(
        f"{path} ({size_text(path.stat().st_size)}) becomes more than {size_text(most)} unpacked: if you trust it, set "
        f"TOOLKIT_MAX_UNPACKED_BYTES to what it may become (now {most})"
    )


def _bytes_of(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    opener = _OPEN.get(path.suffix.lower())
    if opener is None:
        return content
    most = _most_bytes(path)
    try:
        unpacked: bytes = opener(io.BytesIO(content)).read(most + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise UserError(f"{path} is not a whole {path.suffix} file: {error}") from error
    if len(unpacked) > most:
        raise _too_large(path, most)
    return unpacked


def _parquet(path: Path, content: bytes) -> pyarrow.Table:
    import pyarrow
    import pyarrow.parquet

    most, size, batches = _most_bytes(path), 0, []
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(content))
        for batch in file.iter_batches(batch_size=8192):
            size += batch.nbytes
            if size > most:
                raise _too_large(path, most)
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, file.schema_arrow)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def _decoded(path: Path, content: bytes, encoding: str) -> str:
    try:
        # a byte order mark is no part of the first column's name
        return content.decode("utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding)
    except LookupError as error:
        raise UserError(f"--encoding {encoding}: Python knows no such encoding") from error
    except UnicodeError as error:
        raise UserError(_bad_encoding(path, content, encoding, getattr(error, "start", 0))) from error


def _bad_encoding(path: Path, content: bytes, encoding: str, start: int) -> str:
    """Names the line that does not decode, and an encoding in which all of them do, unless it is the file that is
    damaged: of what is not ASCII in it, most is text in `encoding`."""
    if content[:4] == b"PK\x03\x04":
        return f"{path} is an Excel book (or another zip), not text: save it as `CSV UTF-8` there"
    line = content.count(b"\n", 0, start) + 1
    said = f"{path}, line {line}, byte {start + 1} of the file: not {encoding} (0x{content[start]:02x})"
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{said}: pass --encoding utf-16"
    text = content.decode(encoding, "replace")
    bad, foreign = text.count("\ufffd"), sum(not character.isascii() for character in text)
    fits = next((name for name in _LIKELY_ENCODINGS if name != encoding.lower() and _decodes(content, name)), None)
    if fits != "utf-8" and (bad == 1 or bad < foreign / 2):
        return f"{said}; {bad} such places in the file, which is {encoding} otherwise: mend those"
    return f"{said}: {f'pass --encoding {fits}' if fits else 'convert it, or pass its --encoding'}"


def _decodes(content: bytes, encoding: str) -> bool:
    try:
        content.decode(encoding)
    except UnicodeError:
        return False
    return True


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raises UserError for column names that stand twice, or that no table can have."""
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise UserError(f"{path} has more than one column {listing(map(repr, twice))}: rename them")
    odd = [
        name for name in names if "\0" in name or name.encode(errors="replace") != name.encode(errors="surrogatepass")
    ]
    if odd:
        raise UserError(
            f"{path}: the column name {odd[0][:40]!r} is no text: is the file damaged, or of another --encoding?"
        )


# --- CSV, TSV and plain text


def _separator(settings: TextSettings, kind: str) -> str:
    asked = {"\\t": "\t", "tab": "\t"}.get(str(settings.delimiter), settings.delimiter)
    if asked is not None and (len(asked) != 1 or asked in '"\r\n'):
        raise UserError(f"--delimiter {settings.delimiter!r}: give one character, or tab")
    return asked or _DELIMITERS[kind]


def _named(settings: TextSettings) -> list[str]:
    return [name.strip() for name in (settings.column_names or "").split(",") if name.strip()]


def _lines(text: str) -> pyarrow.Table:
    import pyarrow

    lines = text.removesuffix("\n").split("\n") if text else []
    return pyarrow.table({"text": pyarrow.array([line.removesuffix("\r") for line in lines], "string")})


def _separated(path: Path, text: str, settings: TextSettings, separator: str) -> tuple[pyarrow.Table, str]:
    """Raises UserError naming the line of a row that does not fit the header, or where a quote takes in rows."""
    import pyarrow

    rows, starts = _cells(path, text, settings, separator)
    if given := _named(settings):
        rows, starts = [given, *rows], [0, *starts]
    if not rows:
        raise UserError(f"{path} is empty: it holds no columns")
    names = [name or f"Unnamed: {place}" for place, name in enumerate(rows[0])]
    _check_names(path, names)
    widths = set(map(len, rows))
    if max(widths) > len(names):
        row = next(row for row, cells in enumerate(rows) if len(cells) > len(names))
        way = f"put texts that contain {separator!r} in quotes, and double quotes within them"
        raise UserError(
            f"{path}, line {starts[row]}: {len(rows[row])} cells where the header has {len(names)}: "
            f"{way if settings.quoting == 'csv' else 'pass --quoting csv, or another --delimiter'}"
        )
    cells = rows[1:]
    if len(widths) > 1:
        cells = [[*row, *[""] * (len(names) - len(row))] for row in cells]
    columns = zip(*cells, strict=True) if cells else [()] * len(names)
    said = [f"--{name} {value}" for name in ("delimiter", "column_names") if (value := getattr(settings, name))]
    said += ["--quoting none: double quotes are part of the texts"] * (settings.quoting == "none")
    arrays = {name: pyarrow.array(column, "string") for name, column in zip(names, columns, strict=True)}
    return pyarrow.table(arrays), f"{path}: read with {', '.join(said)}" if said else ""


def _cells(path: Path, text: str, settings: TextSettings, separator: str) -> tuple[list[list[str]], list[int]]:
    """(the rows that are not blank, the line that each starts on)."""
    csv.field_size_limit(sys.maxsize)  # a long document is no fault
    quoting: Any = csv.QUOTE_NONE if settings.quoting == "none" else csv.QUOTE_MINIMAL
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, quoting=quoting, strict=True)
    rows: list[list[str]] = []
    ends: list[int] = []
    try:
        for row in reader:  # nothing else in this loop: it is what large files wait for
            rows.append(row)
            ends.append(reader.line_num)
    except csv.Error as error:
        fault = "is never closed" if "end of data" in str(error) else f"closes amid text on line {reader.line_num}"
        start, number = ends[-1] + 1 if ends else 1, sum(map(_is_filled, rows)) + bool(settings.column_names)
        raise UserError(
            f"{path}, line {start} (row {number}): a double quote that begins a cell {fault}: where double quotes are "
            'part of the texts, pass --quoting none; else close it at the end of the cell, or double it ("")'
        ) from error
    starts = [1, *(end + 1 for end in ends)][: len(rows)]
    one_line_each = not rows or ends[-1] == len(rows)
    if min(map(len, rows), default=2) < 2:
        filled = [place for place, row in enumerate(rows) if _is_filled(row)]
        rows = [rows[place] for place in filled]
        starts, ends = ([lines[place] for place in filled] for lines in (starts, ends))
    if not one_line_each:
        spans = enumerate(zip(starts, ends, strict=True))
        _refuse_swallowed(path, text, separator, rows, {row: span for row, span in spans if span[1] > span[0]})
    return rows, starts


def _is_filled(row: list[str]) -> bool:
    return len(row) > 1 or (len(row) == 1 and not row[0].isspace())


def _refuse_swallowed(
    path: Path, text: str, separator: str, rows: list[list[str]], long: dict[int, tuple[int, int]]
) -> None:
    """A quote that is not closed can end at another row's by chance. Then each line of the cell is a row as it stands:
    it has the header's cells, and in some column a value that other rows have there."""
    lines = list(io.StringIO(text, newline=""))
    for number, (start, end) in long.items():
        parts = [line.rstrip("\r\n").split(separator) for line in lines[start - 1 : end]]
        if {len(part) for part in parts} != {len(rows[0])}:
            continue
        for column in range(len(rows[0])):
            known = {row[column] for place, row in enumerate(rows) if place and place not in long and column < len(row)}
            if all(part[column].strip() and part[column] in known for part in parts):
                raise UserError(
                    f"{path}, line {start} (row {number}): a double quote that begins a cell takes in the rows up to "
                    f"line {end}: where double quotes are part of the texts, pass --quoting none; else double it"
                )


# --- JSON


def _loads(text: str) -> Any:
    """Raises ValueError and RecursionError."""
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return made


def _json_lines(path: Path, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(_loads(line))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not JSON ({error})") from error
    return rows


def _json(path: Path, text: str) -> list[Any]:
    """A list of rows; `{"data": [rows]}`; or, under this name too, a row a line."""
    if not text.strip():
        raise UserError(f"{path} is empty")
    try:
        loaded = _loads(text)
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.split("\n") if line.strip()]
        if len(lines) > 1 and all(line.lstrip().startswith("{") and line.rstrip().endswith("}") for line in lines):
            return _json_lines(path, text)
        raise UserError(f"{path}: not JSON ({error})") from error
    if isinstance(loaded, dict):
        lists = [value for value in loaded.values() if isinstance(value, list)]
        if len(lists) == len(loaded) == 1:
            return lists[0]
        if len(loaded) > 1 and (len(lists) == len(loaded) or all(isinstance(part, dict) for part in loaded.values())):
            raise UserError(f"{path} is written by columns: write it by rows (pandas: to_json(orient='records'))")
    return loaded if isinstance(loaded, list) else [loaded]


def _records(path: Path, rows: list[Any], settings: TextSettings) -> tuple[pyarrow.Table, str]:
    """Rows that are objects, or lists of one length."""
    import pyarrow

    if rows and all(isinstance(row, list) and len(row) == len(rows[0]) > 1 for row in rows):
        columns: list[Any] = list(zip(*rows, strict=True))
        names = _named(settings) or _names_of_lists(columns)
        if len(names) != len(columns):
            raise UserError(f"{path}: its rows have {len(columns)} items, and --column_names names {len(names)}")
        said = f"{path}: rows [{', '.join(names)}], lists without names (--column_names gives them others)"
    else:
        odd = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
        if odd is not None:
            raise UserError(f"{path}, row {odd}: not an object with named fields but {str(rows[odd - 1])[:40]!r}")
        names, said = list(dict.fromkeys(name for row in rows for name in row)), ""
        columns = [[row.get(name) for row in rows] for name in names]
    _check_names(path, names)
    arrays = {name: _column(path, name, list(column)) for name, column in zip(names, columns, strict=True)}
    return pyarrow.table(arrays), said


def _names_of_lists(columns: Sequence[Sequence[Any]]) -> list[str]:
    """Of two: the text is what is a string, or what differs most from row to row."""
    if len(columns) != 2:
        return [str(place) for place in range(1, len(columns) + 1)]
    first, second = ((all(isinstance(cell, str) for cell in column), len(set(map(str, column)))) for column in columns)
    return ["text", "label"] if first >= second else ["label", "text"]


def _column(path: Path, name: str, values: list[Any]) -> pyarrow.Array:
    made = _array(values)
    if not isinstance(made, Exception):
        return made
    # the first row, from 1, that cannot stand in one column with those before it
    unfit = range(len(values) + 1)
    row = bisect.bisect_left(unfit, True, key=lambda count: isinstance(_array(values[:count]), Exception))
    said = f"{path}, row {row}: field {name!r} is {str(values[row - 1])[:40]!r}"
    if isinstance(made, UnicodeError):
        raise UserError(f"{said}, which holds half a character (a lone surrogate): mend the text") from made
    raise UserError(f"{said}, unlike the rows before it: make them all alike (all numbers, or all in quotes)") from made


def _array(values: list[Any]) -> pyarrow.Array | Exception:
    import pyarrow

    try:
        return pyarrow.array(values)
    except _UNFIT as error:
        return error
