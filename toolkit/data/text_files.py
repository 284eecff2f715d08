"""Text files: decompress, decode; CSV, TSV and plain text -> batches of rows.

Cells of CSV and TSV stay text, as written: `007`, `null` and `NA` are texts. pyarrow converts them;
before it, a regular expression finds the end of the last whole row in each block of the file, and
where a file is not CSV, Python's csv module names the line.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.config import TextSettings
from toolkit.errors import UserError, listing

if TYPE_CHECKING:
    import pyarrow

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
DELIMITERS = {".csv": ",", ".tsv": "\t"}
BLOCK_ROWS = 16_384
_BLOCK_CHARACTERS = 4 << 20
_MAX_ROW = 64 << 20
"""Characters: bounds the memory that a quote without an end takes."""
_LIKELY_ENCODINGS = ("utf-8", "gb18030", "big5")


def is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("_", "-") in ("utf-8", "utf8")


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
        codecs.lookup(encoding)
    except LookupError as error:
        raise UserError(f"--encoding {encoding}: Python has no such encoding") from error
    if is_utf8(encoding):
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
        return f"{path} is an Excel workbook or a zip, not text: save it as `CSV UTF-8` there"
    fault = f"{path}, line {_undecodable_line(path, encoding)}: not {encoding}"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return f"{fault}: pass --encoding utf-16"
    for other in _LIKELY_ENCODINGS:
        if other != encoding and _undecodable_line(path, other) is None:
            return f"{fault}: pass --encoding {other}"
    return f"{fault}: correct that line, or pass the --encoding of the file"


def _undecodable_line(path: Path, encoding: str) -> int | None:
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


def in_blocks(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Lists of BLOCK_ROWS items; the last may be shorter."""
    iterator = iter(items)
    return iter(lambda: list(itertools.islice(iterator, BLOCK_ROWS)), [])


def check_columns(path: Path, names: Iterable[str]) -> None:
    """Raises UserError for duplicate names."""
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        columns = listing(map(repr, duplicates))
        raise UserError(f"{path} has more than one column {columns}: rename them")


def read_csv(path: Path, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a CSV or TSV file. Raises UserError that names the line of a row with more or
    fewer cells than the header, or of a quote that is not closed at the end of its cell."""
    with open_text(path, settings.encoding) as text:
        yield from _CsvFile(path, settings).read(text)


class _CsvFile:
    """A CSV or TSV file, read from its beginning to its end, once."""

    def __init__(self, path: Path, settings: TextSettings) -> None:
        self.path = path
        self.quoted = settings.quoting == "csv"
        self.delimiter = _delimiter(path, settings)
        self.names = settings.header
        self.lines = 0
        """Lines before the current block."""
        self.rows = 0
        mark = re.escape(self.delimiter)
        cell = rf"[^{mark}\r\n]*+"
        if self.quoted:
            cell = rf'(?:"[^"]*+(?:""[^"]*+)*+"|[^"{mark}\r\n][^{mark}\r\n]*+)?+'
        row = rf"{cell}(?:{mark}{cell})*+\r?\n"
        self.first_row = re.compile(row)
        self.whole_rows = re.compile(rf"(?:{row})*+")

    def read(self, text: io.TextIOWrapper) -> Iterator[pyarrow.RecordBatch]:
        for block in self._blocks(text):
            start = 0
            if not self.names:
                start = self._read_header(block)
            check_columns(self.path, self.names)
            table = self._parse(block, start)
            if self.quoted:
                self._refuse_swallowed_rows(table)
            self.lines += block.count("\n")
            self.rows += table.num_rows
            yield from table.combine_chunks().to_batches()

    def _blocks(self, text: io.TextIOWrapper) -> Iterator[str]:
        """Whole rows, about _BLOCK_CHARACTERS at a time."""
        rest = ""
        while len(rest) < _MAX_ROW:
            part = text.read(_BLOCK_CHARACTERS)
            if not part and rest[-1:] not in ("", "\n"):
                part = "\n"  # the last line's end is missing
            if not part:
                break
            rest += part
            whole = self.whole_rows.match(rest)
            end = whole.end() if whole else 0
            if end:
                yield rest[:end]
                rest = rest[end:]
        if rest:
            self._explain(rest)

    def _read_header(self, block: str) -> int:
        """Sets the columns' names, and returns the end of the header line."""
        line = self.first_row.match(block)
        assert line
        (cells,) = self._python_rows(line[0])
        if not any(cells):
            raise UserError(f"{self.path} is empty, or its first line is: write the columns there")
        # pandas leaves the name of its index empty
        self.names = [name or f"Unnamed: {place}" for place, name in enumerate(cells)]
        return line.end()

    def _parse(self, block: str, start: int) -> pyarrow.Table:
        import pyarrow.csv

        quote: Any = '"' if self.quoted else False
        text = pyarrow.string()
        try:
            return pyarrow.csv.read_csv(
                pyarrow.py_buffer(block[start:].encode()),
                pyarrow.csv.ReadOptions(column_names=self.names, block_size=2 * len(block) + 1024),
                pyarrow.csv.ParseOptions(
                    delimiter=self.delimiter, quote_char=quote, newlines_in_values=True
                ),
                pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(self.names, text), strings_can_be_null=False
                ),
            )
        except pyarrow.ArrowInvalid as error:
            if "Empty CSV" in str(error):  # a header without rows
                return pyarrow.schema([(name, text) for name in self.names]).empty_table()
            self._explain(block)

    def _python_rows(self, text: str) -> Any:
        quoting: Any = csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
        csv.field_size_limit(_MAX_ROW)
        lines = io.StringIO(text, newline="")
        return csv.reader(lines, delimiter=self.delimiter, quoting=quoting, strict=True)

    def _explain(self, text: str) -> NoReturn:
        """Raises UserError for the first invalid row of a text."""
        rows = self._python_rows(text)
        line = self.lines + 1
        width = len(self.names)
        fault = "a lone carriage return (\\r), or a quote that is no quote, ends a row: remove it"
        try:
            for cells in rows:
                width = width or len(cells)
                if cells and len(cells) != width:
                    fault = (
                        f"{len(cells)} cells where the header has {width}: pass another "
                        f"--delimiter than {self.delimiter!r} (and --quoting csv), or put the "
                        "texts "
                        "with it, or with a lone \\r, in double quotes"
                    )
                    break
                line = self.lines + rows.line_num + 1
        except csv.Error as error:
            fault = (
                f"a double quote that begins a cell is not closed at its end ({error}): where "
                "double quotes are part of the texts, pass --quoting none; else double it"
            )
        raise UserError(f"{self.path}, line {line}: {fault}")

    def _refuse_swallowed_rows(self, table: pyarrow.Table) -> None:
        """Raises UserError for a quote that was not meant as one and takes in the rows up to the
        next one: each line of its cell has as many cells as the header, and in some column a value
        of other rows."""
        import pyarrow.compute as pc

        several = False
        for column in table.columns:
            several = pc.or_(several, pc.match_substring(column, "\n"))
        rows = pc.indices_nonzero(several)
        for row, cells in zip(rows.to_pylist(), table.take(rows).to_pylist(), strict=True):
            lines = self.delimiter.join(cells.values()).splitlines()
            parts = [line.split(self.delimiter) for line in lines]
            widths = {len(part) for part in parts}
            if widths == {table.num_columns} and self._recur(table, zip(*parts, strict=True)):
                raise UserError(
                    f"{self.path}, row {self.rows + row + 1}: a double quote that begins a cell "
                    f"takes in {len(lines) - 1} rows after it: if double quotes are part of the "
                    "texts, pass --quoting none; else double it"
                )

    def _recur(self, table: pyarrow.Table, columns: Iterable[tuple[str, ...]]) -> bool:
        for column, cells in zip(table.columns, columns, strict=True):
            others = set(column.unique().to_pylist())
            if all(cell.strip() and cell in others for cell in cells):
                return True
        return False


def _delimiter(path: Path, settings: TextSettings) -> str:
    if settings.delimiter is None:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        return "\t" if ".tsv" in suffixes else ","
    delimiter = {"tab": "\t", "\\t": "\t"}.get(settings.delimiter, settings.delimiter)
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise UserError(f"--delimiter {settings.delimiter!r}: give one ASCII character, or tab")
    return delimiter


def cast_batch(batch: pyarrow.RecordBatch, schema: pyarrow.Schema) -> pyarrow.Table:
    """The batch with the columns and types of the schema; nulls in missing columns."""
    import pyarrow

    tables = [schema.empty_table(), pyarrow.Table.from_batches([batch])]
    return pyarrow.concat_tables(tables, promote_options="permissive")
