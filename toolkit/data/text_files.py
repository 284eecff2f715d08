"""Text files: decompress, decode, split into lines; CSV, TSV and plain text -> batches of rows. Errors name the line.

Cells of CSV and TSV stay strings as written: a reader that guesses types makes `01` a number in one file and a text in
the next, and `null` nothing.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import lzma
import operator
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import TextSettings
from toolkit.data.table import BATCH_ROWS
from toolkit.errors import UserError, listing, size_text

if TYPE_CHECKING:
    import pyarrow

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNPACKED_BYTES, _UNPACKED_RATIO = 1 << 30, 100
"""A compressed file may expand to so many bytes, or to so many times its size; texts expand 3 to 20 times."""
MAX_CELL = 1 << 26
"""Characters of one cell, and of one line: bounds the memory that a quote without an end takes."""
_LIKELY_ENCODINGS = ("utf-8", "gb18030", "big5")
_CHUNK_BYTES = 1 << 20
_MAX_COLUMNS = 10_000
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


def max_unpacked_bytes(*paths: Path) -> int:
    """How far compressed files may expand: beyond it is more likely a decompression bomb than data."""
    setting = os.environ.get("TOOLKIT_MAX_UNPACKED_BYTES", "")
    compressed = sum(path.stat().st_size for path in paths)
    return (
        int(setting) if setting.isdecimal() else max(_UNPACKED_BYTES, _UNPACKED_RATIO * compressed)
    )


def too_large(path: Path, limit: int) -> UserError:
    """The error for a file that expands to more than `limit` bytes."""
    return UserError(
        f"{path} ({size_text(path.stat().st_size)}) becomes more than {size_text(limit)} unpacked: if you trust it, "
        f"set TOOLKIT_MAX_UNPACKED_BYTES to what it may become (now {limit})"
    )


class _Unpacked(io.RawIOBase):
    """The bytes of a file, decompressed where its name ends in .gz, .bz2 or .xz. Reading raises UserError."""

    def __init__(self, path: Path) -> None:
        opener = OPENERS.get(path.suffix.lower())
        self.path, self.bytes_read = path, 0
        self.limit = max_unpacked_bytes(path) if opener else None
        try:
            self.file = (opener or open)(path, "rb")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self.file.readinto(buffer)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
            if self.limit is None:
                raise UserError(f"{self.path} cannot be read: {error}") from error
            raise UserError(
                f"{self.path} is not a whole {self.path.suffix} file: {error}"
            ) from error
        self.bytes_read += count
        if self.limit is not None and self.bytes_read > self.limit:
            raise too_large(self.path, self.limit)
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def open_text(path: Path, encoding: str, newline: str = "") -> io.TextIOWrapper:
    """Like `open`, for compressed files too. Raises UserError; reading raises UnicodeError."""
    # so that a byte order mark is not part of the first column's name
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    buffer = io.BufferedReader(_Unpacked(path), _CHUNK_BYTES)
    if codec != "utf-8-sig" and buffer.peek(3).startswith(
        codecs.BOM_UTF8
    ):  # GB18030 decodes it, to other characters
        raise UserError(
            f"{path} begins with UTF-8's byte order mark, and --encoding is {encoding}: pass utf-8"
        )
    try:
        mark = "\ufeff".encode(codec, "ignore")
    except LookupError as error:
        raise UserError(f"--encoding {encoding}: Python has no such encoding") from error
    if mark and buffer.peek(len(mark)).startswith(mark):  # only `-sig` codecs and UTF-16 remove it
        buffer.read(len(mark))
    return io.TextIOWrapper(buffer, codec, newline=newline)


def spreadsheet_encoding(file: str, encoding: str) -> str:
    """`utf-8-sig` if the UTF-8 file begins with a byte order mark, without which Excel shows Chinese as garbage."""
    if encoding.lower().replace("_", "-") not in ("utf-8", "utf8") or not Path(file).is_file():
        return encoding
    with io.BufferedReader(_Unpacked(Path(file))) as buffer:
        return "utf-8-sig" if buffer.peek(3).startswith(codecs.BOM_UTF8) else encoding


def split_lines(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    """Raises UserError for a line of MAX_CELL characters."""
    for number in itertools.count(1):
        line = text.readline(MAX_CELL)
        if not line:
            return
        if len(line) == MAX_CELL:
            raise UserError(
                f"{path}, line {number}: longer than {MAX_CELL} characters: put each row, or each text, on a line of "
                "its own"
            )
        yield line


def encoding_fault(path: Path, encoding: str) -> str:
    """Names the first line that does not decode, and an encoding in which all lines do; none if most text that is
    not ASCII does decode: then the file is damaged."""
    decoders = {
        name: codecs.getincrementaldecoder(name)() for name in (encoding, *_LIKELY_ENCODINGS)
    }
    replacing = codecs.getincrementaldecoder(encoding)("replace")
    bytes_read = lines_read = bad = foreign = 0
    start_bytes, fault = b"", ""
    with io.BufferedReader(_Unpacked(path), _CHUNK_BYTES) as file:
        while line := file.readline(_CHUNK_BYTES):
            start_bytes = start_bytes or line[:4]
            final, bytes_read = not file.peek(1), bytes_read + len(line)
            for name, decoder in list(decoders.items()):
                try:
                    decoder.decode(line, final)
                except UnicodeError as error:
                    del decoders[name]
                    if name == encoding:
                        decoded, start = getattr(error, "object", line), getattr(error, "start", 0)
                        where = f"line {lines_read + 1}, byte {bytes_read - len(decoded) + start + 1} of the file"
                        fault = f"{path}, {where}: not {encoding} (0x{decoded[start]:02x})"
            lines_read += line.endswith(b"\n")
            text = replacing.decode(line, final)
            bad, foreign = (
                bad + text.count("\ufffd"),
                foreign + sum(not character.isascii() for character in text),
            )
    if start_bytes in (b"PK\x03\x04", b"\xd0\xcf\x11\xe0"):  # .xlsx, .xls
        return (
            f"{path} is an Excel workbook (or another zip), not text: save it as `CSV UTF-8` there"
        )
    if start_bytes[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{fault}: pass --encoding utf-16"
    other = next((name for name in decoders if name != encoding), None)
    larger = other == "gb18030" and encoding.lower() in (
        "gbk",
        "gb2312",
        "cp936",
    )  # which it contains
    if other != "utf-8" and not larger and (bad == 1 or bad < foreign / 2):
        return (
            f"{fault}; {bad} such places in the file, which is {encoding} otherwise: correct those"
        )
    return (
        f"{fault}: {f'pass --encoding {other}' if other else 'convert it, or pass its --encoding'}"
    )


def read_plain(path: Path, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    """A text for each line, or for the lines between blank ones, in the column `text`."""
    import pyarrow

    with open_text(path, settings.encoding, "\n") as text:
        lines: Iterable[str] = (
            line.removesuffix("\n").removesuffix("\r") for line in split_lines(path, text)
        )
        if settings.sample_by == "paragraph":
            groups = itertools.groupby(lines, key=lambda line: bool(line.strip()))
            lines = ("\n".join(group).strip() for filled, group in groups if filled)
        for texts in in_batches(lines):
            yield pyarrow.record_batch({"text": pyarrow.array(texts, "string")})


def read_csv(path: Path, settings: TextSettings, kind: str) -> Iterator[pyarrow.RecordBatch]:
    """CSV or TSV. Raises UserError naming the line of a row that does not fit the header, or of an unclosed quote."""
    import pyarrow

    delimiter = {"\\t": "\t", "tab": "\t"}.get(str(settings.delimiter), settings.delimiter)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise UserError(f"--delimiter {settings.delimiter!r}: give one character, or tab")
    delimiter = delimiter or DELIMITERS[kind]
    header = names = settings.header
    what = (
        "names the columns as --column_names does: leave that out"
        if names
        else "repeats the header: remove it"
    )
    for rows, starts in _cells(path, settings, delimiter):
        if starts[0] == 1 and re.fullmatch("sep=.?", rows[0][0], re.IGNORECASE):
            raise UserError(
                f"{path}, line 1: remove this line for Excel (sep=), and pass its --delimiter"
            )
        if not names:
            header, rows, starts = rows[0], rows[1:], starts[1:]
            names = header
        for repeated in (header, ["\ufeff" + header[0], *header[1:]]):
            if len(header) > 1 and repeated in rows:
                raise UserError(f"{path}, line {starts[rows.index(repeated)]} {what}")
        names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
        check_column_names(path, names)
        widths = set(map(len, rows))
        if max(widths, default=0) > len(names):
            row = next(row for row, cells in enumerate(rows) if len(cells) > len(names))
            remedy = (
                f"put texts that contain {delimiter!r} in quotes, and double quotes within them"
            )
            remedy = _other_delimiter(names) or remedy
            raise UserError(
                f"{path}, line {starts[row]}: {len(rows[row])} cells where the header has {len(names)}: "
                f"{remedy if settings.quoting == 'csv' else 'pass --quoting csv, or another --delimiter'}"
            )
        if widths != {len(names)}:
            rows = [[*row, *[""] * (len(names) - len(row))] for row in rows]
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        yield pyarrow.record_batch([pyarrow.array(column, "string") for column in columns], names)
    if not names:
        raise UserError(f"{path} is empty: it holds no columns")


def _cells(
    path: Path, settings: TextSettings, delimiter: str
) -> Iterator[tuple[list[list[str]], Sequence[int]]]:
    """Batches of (rows that are not blank, the line that each starts on)."""
    csv.field_size_limit(MAX_CELL)
    quoting: Any = csv.QUOTE_NONE if settings.quoting == "none" else csv.QUOTE_MINIMAL
    batch_lines: list[str] = []
    line_end, lines_read, rows_read = "", 0, int(bool(settings.column_names))
    with open_text(path, settings.encoding) as text:
        lines = (batch_lines.append(line) or line for line in split_lines(path, text))  # type: ignore[func-returns-value]
        reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
        while True:
            rows: list[list[str]] = []
            batch_lines.clear()
            try:
                rows.extend(itertools.islice(reader, BATCH_ROWS))  # keeps the rows before an error
            except csv.Error as error:
                ends = "end of data" in str(error) or "field limit" in str(error)
                fault = (
                    "is never closed"
                    if ends
                    else f"is followed by more text on line {reader.line_num}"
                )
                start, number = (
                    lines_read + sum(map(_height, rows)) + 1,
                    rows_read + sum(map(_is_filled, rows)),
                )
                remedy = (
                    "where double quotes are part of the texts, pass --quoting none; else close it at the end of the "
                    'cell, or double it ("")'
                )
                remedy = (_other_delimiter(rows[0]) if rows and not lines_read else "") or remedy
                raise UserError(
                    f"{path}, line {start} (row {number}): a double quote that begins a cell {fault}: {remedy}"
                ) from error
            if not rows:
                return
            starts: Sequence[int] = range(lines_read + 1, reader.line_num + 1)
            if len(starts) > len(rows):
                starts = list(itertools.accumulate(map(_height, rows[:-1]), initial=lines_read + 1))
                _refuse_quoted_rows(path, batch_lines, delimiter, rows, starts, rows_read)
            line_end = line_end or batch_lines[0][-1]
            if line_end == "\n" and "\r" in map(operator.itemgetter(-1), batch_lines):
                _refuse_carriage_returns(path, batch_lines, starts)
            if min(map(len, rows)) < 2:
                places = [place for place, row in enumerate(rows) if _is_filled(row)]
                rows, starts = (
                    [rows[place] for place in places],
                    [starts[place] for place in places],
                )
            lines_read, rows_read = reader.line_num, rows_read + len(rows)
            if rows:
                yield rows, starts


def _other_delimiter(header: Sequence[str]) -> str:
    """The remedy if the header is one cell with another delimiter in it; else ""."""
    names = {"\t": "tab", ";": "';'", "|": "'|'", ",": "','"}
    other = next(
        (name for each, name in names.items() if len(header) == 1 and each in header[0]), None
    )
    return f"the header {header[0]!r} is one cell: pass --delimiter {other}" if other else ""


def _is_filled(row: list[str]) -> bool:
    return len(row) > 1 or (len(row) == 1 and not row[0].isspace())


def _height(row: list[str]) -> int:
    """The number of lines of a row."""
    return 1 + sum(len(_LINE_BREAK.findall(cell)) for cell in row)


def _refuse_carriage_returns(path: Path, lines: list[str], starts: Sequence[int]) -> None:
    """Raises UserError if a row ends in a lone \\r, and the header in \\n: csv.writer, and pandas, write such a text
    without quotes, and it would become two rows."""
    for start, following in itertools.pairwise([*starts, starts[0] + len(lines)]):
        if re.search(r"[^\r]\r\Z", lines[following - 1 - starts[0]]):  # blank lines do not matter
            raise UserError(
                f"{path}, line {start}: a lone carriage return (\\r) in a text without quotes ends the row: remove it, "
                "or write all texts in quotes (pandas: to_csv(quoting=csv.QUOTE_ALL))"
            )


def _refuse_quoted_rows(
    path: Path,
    lines: list[str],
    delimiter: str,
    rows: list[list[str]],
    starts: Sequence[int],
    rows_read: int,
) -> None:
    """Raises UserError if an unclosed quote makes rows, up to another row's quote, one cell: each line of the cell
    has as many cells as the header, and in some column a value that other rows have there."""
    heights = list(map(_height, rows))
    width = max(map(len, rows))
    values: list[set[str]] = [set() for _ in range(width)]  # of each column, without the header
    for place, row in enumerate(rows):
        if rows_read + place and heights[place] == 1:
            for cell, others in zip(row, values, strict=False):
                others.add(cell)
    for place in (place for place, height in enumerate(heights) if height > 1):
        first = starts[place] - starts[0]
        parts = [
            line.rstrip("\r\n").split(delimiter) for line in lines[first : first + heights[place]]
        ]
        if {len(part) for part in parts} != {width}:
            continue
        columns = zip(zip(*parts, strict=True), values, strict=True)
        if any(all(cell.strip() and cell in others for cell in cells) for cells, others in columns):
            number = rows_read + sum(map(_is_filled, rows[:place]))
            raise UserError(
                f"{path}, line {starts[place]} (row {number}): a double quote that begins a cell takes in the rows "
                f"up to line {starts[place] + heights[place] - 1}: if double quotes are part of the texts, pass "
                "--quoting none; else double it"
            )


def in_batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    return iter(lambda: list(itertools.islice(iterator, BATCH_ROWS)), [])


def check_column_names(path: Path, names: Sequence[str]) -> None:
    """Raises UserError for too many columns, duplicate names, and names that cannot be encoded."""
    if len(names) > _MAX_COLUMNS:
        raise UserError(
            f"{path} has {len(names)} columns, and at most {_MAX_COLUMNS} are read: keep those with the texts and the "
            "labels"
        )
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(
            f"{path} has more than one column {listing(map(repr, duplicates))}: rename them"
        )
    odd = [
        name
        for name in names
        if "\0" in name or name.encode(errors="replace") != name.encode(errors="surrogatepass")
    ]
    if odd:
        raise UserError(
            f"{path}: the column name {odd[0][:40]!r} is no text: is the file damaged, or of another --encoding?"
        )


def unify_schemas(first: pyarrow.Schema, second: pyarrow.Schema) -> pyarrow.Schema:
    """The columns of both, of types that hold both. Raises pyarrow's errors if there is none."""
    import pyarrow

    return (
        first
        if first == second
        else pyarrow.unify_schemas([first, second], promote_options="permissive")
    )


def cast_batch(batch: pyarrow.RecordBatch, schema: pyarrow.Schema) -> pyarrow.Table:
    """The batch with the columns and types of the schema; nulls in missing columns."""
    import pyarrow

    tables = [schema.empty_table(), pyarrow.Table.from_batches([batch])]
    return pyarrow.concat_tables(tables, promote_options="permissive")
