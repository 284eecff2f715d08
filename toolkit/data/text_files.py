"""Text files: decompress, decode; CSV, TSV and plain text -> batches of rows.

Cells of CSV and TSV stay text, as written: `007`, `null` and `NA` are texts.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import TextSettings
from toolkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
DELIMITERS = {".csv": ",", ".tsv": "\t"}
BLOCK_ROWS = 512
"""So few lists that the garbage collector does not visit them again and again: with 16,384 rows CSV
takes four times as long."""
_MAX_CELL = 64 << 20
"""Characters: bounds the memory that a quote without an end takes."""
_LIKELY_ENCODINGS = ("utf-8", "gb18030", "big5")


def open_bytes(path: Path) -> Any:
    """The decompressed bytes of a file."""
    return OPENERS.get(path.suffix.lower(), open)(path, "rb")


def has_utf8_mark(path: Path) -> bool:
    """Whether it begins with UTF-8's byte order mark, as Excel's CSV files do."""
    with open_bytes(path) as file:
        return bool(file.read(3) == codecs.BOM_UTF8)


def open_text(path: Path, encoding: str) -> io.TextIOWrapper:
    """The text of a file, without a byte order mark. Raises UserError; reading raises
    UnicodeError."""
    try:
        name = codecs.lookup(encoding).name
    except LookupError as error:
        raise UserError(f"--encoding {encoding}: Python has no such encoding") from error
    if name == "utf-8":
        encoding = "utf-8-sig"
    elif has_utf8_mark(path):  # GB18030 decodes it, to other characters
        fault = f"begins with UTF-8's byte order mark, and --encoding is {encoding}"
        raise UserError(f"{path} {fault}: pass utf-8")
    return io.TextIOWrapper(open_bytes(path), encoding, newline="\n")


def encoding_fault(path: Path, encoding: str) -> str:
    """Names the first line that does not decode, and an encoding in which all lines do."""
    with open_bytes(path) as file:
        start = file.read(4)
    if start == b"PK\x03\x04":
        return (
            f"{path} is an Excel workbook or a zip, not text: save it as `CSV UTF-8` there"
        )
    fault = f"{path}, line {_undecodable_line(path, encoding)}: not {encoding}"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return f"{fault}: pass --encoding utf-16"
    for other in _LIKELY_ENCODINGS:
        if other != encoding and _undecodable_line(path, other) is None:
            return f"{fault}: pass --encoding {other}"
    return f"{fault}: correct that line, or pass the --encoding of the file"


def _undecodable_line(path: Path, encoding: str) -> int | None:
    """The number of the first line that is not in this encoding, from 1; None: all are."""
    decoder = codecs.getincrementaldecoder(encoding)()
    number = 1
    with open_bytes(path) as file:
        try:
            for line in file:
                decoder.decode(line)
                number += 1
            decoder.decode(b"", final=True)
        except UnicodeError:
            return number
    return None


def read_plain(path: Path, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    """A text for each line, or for the lines between blank ones, in the column `text`."""
    import pyarrow

    with open_text(path, settings.encoding) as text:
        texts: Iterable[str] = (line.rstrip("\r\n") for line in text)
        if settings.sample_by == "paragraph":
            groups = itertools.groupby(texts, key=lambda line: bool(line.strip()))
            texts = ("\n".join(lines).strip() for has_text, lines in groups if has_text)
        for block in in_blocks(texts):
            yield pyarrow.record_batch({"text": pyarrow.array(block, "string")})


def in_blocks(items: Iterable[Any], size: int | None = None) -> Iterator[list[Any]]:
    """Lists of `size` items, or BLOCK_ROWS; the last may be shorter."""
    iterator = iter(items)
    while block := list(itertools.islice(iterator, size or BLOCK_ROWS)):
        yield block


def check_columns(path: Path, names: list[str]) -> None:
    """Raises UserError for duplicate names."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path} has more than one column {name!r}: rename them")


def read_csv(path: Path, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a CSV or TSV file. Raises UserError that names the line of a row with more or
    fewer cells than the header, or of a quote that is not closed at the end of its cell."""
    import pyarrow

    with open_text(path, settings.encoding) as text:
        delimiter = _delimiter(path, settings)
        rows = _csv_rows(path, text, delimiter, settings)
        names = settings.header or _column_names(path, next(rows, []))
        check_columns(path, names)
        first_row = 1
        for block in in_blocks(rows):
            columns = list(zip(*block, strict=True))
            if any("\n" in "".join(cells) for cells in columns):
                _refuse_swallowed_rows(path, block, first_row, delimiter)
            yield pyarrow.record_batch([pyarrow.array(cells) for cells in columns], names)
            first_row += len(block)


def _csv_rows(
    path: Path, text: io.TextIOWrapper, delimiter: str, settings: TextSettings
) -> Iterator[list[str]]:
    """The rows, blank lines left out, all as wide as the header or the first."""
    quoting: Any = csv.QUOTE_MINIMAL if settings.quoting == "csv" else csv.QUOTE_NONE
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True)
    width = len(settings.header)
    line = 1
    try:
        for cells in reader:
            if cells:
                width = width or len(cells)
                if len(cells) != width:
                    raise UserError(
                        f"{path}, line {line}: {len(cells)} cells where the header has {width}: "
                        f"pass another --delimiter than {delimiter!r} (and --quoting csv), or put "
                        "the texts with it in double quotes"
                    )
                yield cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line}: a double quote that begins a cell is not closed at its end, or "
            f"a lone carriage return (\\r) ends a row ({error}): where double quotes are part of "
            "the texts, pass --quoting none; else double them, and quote the cell with \\r"
        ) from error


def _column_names(path: Path, cells: list[str]) -> list[str]:
    """The names in a header line. Raises UserError for an empty one."""
    if not any(cells):
        raise UserError(f"{path} is empty, or its first line is: write the columns there")
    # pandas leaves the name of its index empty
    return [name or f"Unnamed: {place}" for place, name in enumerate(cells)]


def _refuse_swallowed_rows(
    path: Path, block: list[list[str]], first_row: int, delimiter: str
) -> None:
    """Raises UserError for a quote that was not meant as one and takes in the rows up to the next
    one: each line of its cell has as many cells as the header, and in some column each is a value
    of other rows."""
    columns = [set(cells) for cells in zip(*block, strict=True)]
    for number, row in enumerate(block, first_row):
        lines = [line.split(delimiter) for line in delimiter.join(row).splitlines()]
        widths = set(map(len, lines))
        if len(lines) < 2 or widths != {len(row)}:
            continue
        for values, cells in zip(columns, zip(*lines, strict=True), strict=True):
            if all(cell.strip() and cell in values for cell in cells):
                raise UserError(
                    f"{path}, row {number}: a double quote that begins a cell takes in "
                    f"{len(lines) - 1} rows after it: if double quotes are part of the texts, pass "
                    "--quoting none; else double it"
                )


def _delimiter(path: Path, settings: TextSettings) -> str:
    """`--delimiter`, or by the file's ending. Raises UserError for what cannot be one."""
    if settings.delimiter is None:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        return "\t" if ".tsv" in suffixes else ","
    delimiter = {"tab": "\t", "\\t": "\t"}.get(settings.delimiter, settings.delimiter)
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise UserError(
            f"--delimiter {settings.delimiter!r}: give one ASCII character, or tab"
        )
    return delimiter
