"""One file -> an Arrow table, with errors that name the line or the row.

Cells of CSV and TSV stay as they are written: a reader that guesses types makes `01` a number in one file
and a text in the next, `null` nothing, and a column's meaning dependent on its other rows.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_OPEN: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
}
_LIKELY_ENCODINGS = ("utf-8", "gb18030", "big5", "utf-16")
FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")


def format_of(path: Path) -> str:
    """`reviews.csv.gz` -> `.csv`. Raises UserError for an ending no reader knows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _OPEN:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise UserError(f"{path}: cannot tell its format: name it {', '.join(FORMATS)} (or with .gz behind)")
    return suffixes[-1]


def parse_file(path: Path, encoding: str) -> pyarrow.Table:
    """Reads a whole file. Raises UserError when it is broken, holds no rows or is encoded otherwise."""
    kind = format_of(path)
    content = _bytes_of(path)
    if kind == ".parquet":
        table = _parquet(path, content)
    else:
        text = _decoded(path, content, encoding)
        table = _separated(path, text, "\t" if kind == ".tsv" else ",") if kind in (".csv", ".tsv") else None
        if table is None:
            table = _records(path, _json_lines(path, text) if kind == ".jsonl" else _json(path, text))
    if table.num_rows == 0:
        raise UserError(f"{path} has a header and no rows" if kind in (".csv", ".tsv") else f"{path} holds no rows")
    return table


def _bytes_of(path: Path) -> bytes:
    content = path.read_bytes()
    opener = _OPEN.get(path.suffix.lower())
    if opener is None:
        return content
    try:
        return opener(content)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise UserError(f"{path} is not a whole {path.suffix} file: {error}") from error


def _parquet(path: Path, content: bytes) -> pyarrow.Table:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(io.BytesIO(content))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {_line(error)}") from error


def _decoded(path: Path, content: bytes, encoding: str) -> str:
    try:
        # a byte order mark is no part of the first column's name
        return content.decode("utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding)
    except LookupError as error:
        raise UserError(f"--encoding {encoding}: Python knows no such encoding") from error
    except UnicodeError as error:
        raise UserError(_bad_encoding(path, content, encoding, error)) from error


def _bad_encoding(path: Path, content: bytes, encoding: str, error: UnicodeError) -> str:
    """Names the line that does not decode, and an encoding in which all of them do."""
    if content[:4] == b"PK\x03\x04":
        return f"{path} is an Excel book (or another zip), not text: save it as `CSV UTF-8` there"
    start = getattr(error, "start", 0)
    line = content.count(b"\n", 0, start) + 1
    marked = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    likely = ("utf-16",) if marked else tuple(name for name in _LIKELY_ENCODINGS if name != encoding.lower())
    fits = next((name for name in likely if _decodes(content, name)), None)
    mend = f"pass --encoding {fits}" if fits else "convert it, or pass its --encoding"
    return f"{path}, line {line}: not {encoding} (byte 0x{content[start]:02x}): {mend}"


def _decodes(content: bytes, encoding: str) -> bool:
    try:
        content.decode(encoding)
    except UnicodeError:
        return False
    return True


def _separated(path: Path, text: str, separator: str) -> pyarrow.Table:
    import pandas as pd
    import pyarrow

    if separator == "\t" and _quotes_swallow(text):
        raise UserError(
            f"{path}: a double quote at the start of a cell takes in what is behind it: close it, or double it"
        )
    with warnings.catch_warnings():
        # every row longer than the header: pandas would drop its end
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            frame = pd.read_csv(
                io.StringIO(text), sep=separator, dtype=str, keep_default_na=False, index_col=False, low_memory=False
            )
        except pd.errors.EmptyDataError as error:
            raise UserError(f"{path} is empty: it holds no columns") from error
        except pd.errors.ParserWarning as error:
            raise UserError(
                f"{path}: the rows hold more cells than the header: put texts that contain {separator!r} in quotes"
            ) from error
        except pd.errors.ParserError as error:
            hint = f"put texts that contain {separator!r} in quotes, and double quotes within them"
            raise UserError(f"{path}: {_line(error).split('error: ')[-1]}: {hint}") from error
    return pyarrow.Table.from_pandas(frame, preserve_index=False)


def _quotes_swallow(text: str) -> bool:
    """Whether every line has the header's cells as it stands, and quotes would join some of them."""
    lines = [line for line in text.splitlines() if line]
    cells = {line.count("\t") for line in lines}
    try:
        return len(cells) == 1 and sum(1 for _ in csv.reader(io.StringIO(text), delimiter="\t")) < len(lines)
    except csv.Error:  # a cell of over 131072 characters: a long document, or everything behind an open quote
        return '"' in text and len(cells) == 1


def _json_lines(path: Path, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: not JSON ({error})") from error
    return rows


def _json(path: Path, text: str) -> list[Any]:
    """A list of rows; `{"data": [rows]}`; or, under this name too, a row a line."""
    if not text.strip():
        raise UserError(f"{path} is empty")
    try:
        loaded = json.loads(text)
    except ValueError as error:
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


def _records(path: Path, rows: list[Any]) -> pyarrow.Table:
    import pyarrow

    odd = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if odd is not None:
        raise UserError(f"{path}, row {odd}: not an object with named fields but {str(rows[odd - 1])[:40]!r}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pyarrow.table({name: _column(path, name, [row.get(name) for row in rows]) for name in names})


def _column(path: Path, name: str, values: list[Any]) -> pyarrow.Array:
    import pyarrow

    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, TypeError, OverflowError) as error:
        odd = _first_odd(values)
        raise UserError(
            f"{path}, row {odd}: field {name!r} is {str(values[odd - 1])[:40]!r}, unlike the rows before "
            "it: make them all alike (all numbers, or all in quotes)"
        ) from error


def _first_odd(values: list[Any]) -> int:
    """The first row, from 1, that cannot stand in one column with those before it."""
    import pyarrow

    good, bad = 0, len(values)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            pyarrow.array(values[:middle])
            good = middle
        except (pyarrow.ArrowException, TypeError, OverflowError):
            bad = middle
    return bad


def _line(error: BaseException) -> str:
    """The first line of another library's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
