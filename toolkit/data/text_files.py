"""Text files: decompress, decode; CSV, TSV, fastText, plain text and a folder of them -> batches of
rows.

Cells of CSV and TSV stay text, as written: `007`, `null` and `NA` are texts.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from natsort import natsorted

from toolkit.config import TextSettings
from toolkit.data.columns import USUAL_LABELS, USUAL_TEXT, has_usual
from toolkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
CONLL = (".conll", ".bio", ".bmes")
FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt", *CONLL)
TAB = "\t"
DELIMITERS = {".csv": ",", ".tsv": TAB}
BLOCK_ROWS = 512
"""So few lists that the garbage collector does not visit them again and again: with 16,384 rows CSV
takes four times as long."""
_MAX_CELL = 64 << 20
"""Characters: bounds the memory that a quote without an end takes."""
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LIKELY_ENCODINGS = ("utf-8", "gb18030", "big5")
_LIKELY_DELIMITERS = ("\t", "_!_", "\x01", ",", ";", "|", "^", "~")
_NO_TEXT = {
    b"PK\x03\x04": "an Excel workbook or a zip: save it as `CSV UTF-8` there, or unpack it",
    b"\xd0\xcf\x11\xe0": "an Excel workbook: save it as `CSV UTF-8` there",
    b"\x1f\x8b": "compressed: add .gz to its name",
    b"BZh": "compressed: add .bz2 to its name",
    b"PAR1": "a Parquet file: name it .parquet",
}
"""With what other files begin, and what to do with them."""
_UNIT = "\x1f"
"""ASCII's unit separator, which stands for a delimiter of several characters: `csv` takes one."""
_FASTTEXT_LABEL = re.compile(r"(?<!\S)__label__(\S+)\s*")
_TAGGED = re.compile(r"\S.*\s(O|[BIMESLU]-\S+)")
"""A line of CoNLL columns: a token, and last its tag."""


def format_of(path: Path) -> str:
    """`reviews.csv.gz` -> `.csv`; empty for a folder. Raises UserError for an ending without a
    reader."""
    if path.is_dir():
        return ""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in OPENERS:
        suffixes.pop()
    if suffixes and suffixes[-1] in FORMATS:
        return suffixes[-1]
    formats = f"{', '.join(FORMATS)} (also with .gz or .bz2 after it)"
    raise UserError(
        f"{path}: its format is unclear: name it {formats}; a workbook is saved as `CSV UTF-8` in "
        "Excel, other archives are unpacked"
    )


def open_bytes(path: Path) -> Any:
    """The decompressed bytes of a file."""
    return OPENERS.get(path.suffix.lower(), open)(path, "rb")


def encoding_of(path: Path, settings: TextSettings) -> str:
    """`--encoding`, or that of the byte order mark with which a file begins, as Excel's do."""
    with open_bytes(path) as file:
        start = file.read(3)
    for mark, encoding in _MARKS.items():
        if start.startswith(mark):
            return encoding
    return settings.encoding


def open_text(path: Path, settings: TextSettings) -> io.TextIOWrapper:
    """The text of a file, without a byte order mark. Raises UserError; reading raises
    UnicodeError."""
    encoding = encoding_of(path, settings)
    errors = settings.encoding_errors
    try:
        return io.TextIOWrapper(open_bytes(path), encoding, errors, newline="\n")
    except LookupError as error:
        raise UserError(f"--encoding {encoding!r}: Python has no such encoding") from error


def encoding_fault(path: Path, encoding: str) -> str:
    """Names the first line that does not decode, and the encoding in which most lines do."""
    with open_bytes(path) as file:
        start = file.read(4)
    for mark, what in _NO_TEXT.items():
        if start.startswith(mark):
            return f"{path} is no text, but {what}"
    encodings = (encoding, *_LIKELY_ENCODINGS)
    faults = {name: undecodable_lines(path, name) for name in encodings}
    best = min(faults, key=lambda name: faults[name][1])
    fault = f"{path}, line {faults[encoding][0]}: not {encoding}"
    count = faults[best][1]
    if not count:
        return f"{fault}: pass --encoding {best}"
    return (
        f"{fault}: correct the file, or pass its --encoding, or --encoding {best} "
        f"--encoding_errors replace (not in {best}: {count} of its lines)"
    )


def undecodable_lines(path: Path, encoding: str) -> tuple[int, int]:
    """The number of the first line that is not in this encoding, from 1, and how many are not."""
    first = count = 0
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode(encoding)
            except UnicodeError:
                first = first or number
                count += 1
    return first, count


# --- what the first lines show


def first_lines(path: Path, settings: TextSettings, count: int = 20) -> list[str]:
    """Lines that are not blank."""
    with open_text(path, replace(settings, encoding_errors="replace")) as text:
        lines = (line.rstrip("\r\n") for line in text)
        return list(itertools.islice(filter(str.strip, lines), count))


def is_json(lines: list[str]) -> bool:
    """Whether a file that begins with these lines holds objects, or a list of them; Python's, too,
    which are refused as JSON."""
    return bool(re.match(r"\s*(\[\s*)?\{\s*[\"']", "\n".join(lines)))


def is_fasttext(lines: list[str]) -> bool:
    return any(map(_FASTTEXT_LABEL.search, lines))


def is_conll(lines: list[str]) -> bool:
    return bool(lines) and all(map(_TAGGED.fullmatch, lines))


def likely_delimiter(lines: list[str]) -> str:
    """What all lines have equally often: several signs, or a usual one; empty for nothing."""
    signs = re.findall(r"(?<=\w)\s?([^\w\s]{2,})(?=\s?\w)", "".join(lines[:1]))
    for delimiter in (*signs, *_LIKELY_DELIMITERS):
        counts = {line.count(delimiter) for line in lines}
        if len(counts) == 1 and counts != {0}:
            return delimiter
    return ""


def advice(path: Path, settings: TextSettings) -> str:
    """What to pass if the columns of a file are not those that it was written with; empty if its
    first lines do not show it."""
    lines = first_lines(path, settings)
    if is_json(lines):
        return "it holds JSON: name it .json, and leave out --delimiter"
    if is_fasttext(lines):
        return "its lines are fastText's: name it .txt, and leave out --delimiter"
    delimiter = likely_delimiter(lines)
    if delimiter in ("", delimiter_of(path, settings)):
        return ""
    return f"pass --delimiter {'tab' if delimiter == TAB else repr(delimiter)}"


def delimiter_of(path: Path, settings: TextSettings) -> str:
    """`--delimiter`, or by the file's ending; empty if a text is a line. Raises UserError for what
    cannot be one."""
    if settings.delimiter is None:
        return DELIMITERS.get(format_of(path), TAB if settings.header else "")
    delimiter = {"tab": TAB, "none": ""}.get(settings.delimiter, settings.delimiter)
    delimiter = delimiter.replace("\\t", TAB).replace("\\x01", "\x01")
    if set(delimiter) & set('"\r\n'):
        raise UserError(
            f"--delimiter {settings.delimiter!r}: give other characters, or tab"
        )
    return delimiter


def read_plain(path: Path, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    """A text for each line, or for the lines between blank ones, in the column `text`. Raises
    UserError if the lines look like rows with tabs."""
    import pyarrow

    has_tabs = likely_delimiter(first_lines(path, settings)) == TAB
    if has_tabs and settings.delimiter is None:
        raise UserError(
            f"{path}: all lines have equally many tabs: for a table pass --delimiter tab (and "
            "--column_names if it has no header), for a text a line --delimiter none"
        )
    with open_text(path, settings) as text:
        texts: Iterable[str] = (line.rstrip("\r\n") for line in text)
        if settings.sample_by == "paragraph":
            groups = itertools.groupby(texts, key=lambda line: bool(line.strip()))
            texts = ("\n".join(lines).strip() for has_text, lines in groups if has_text)
        for block in in_blocks(texts):
            yield pyarrow.record_batch({"text": pyarrow.array(block, "string")})


def fasttext_rows(path: Path, settings: TextSettings) -> Iterator[dict[str, Any]]:
    """`__label__A __label__B a text`: lists of labels, or, where no line has several, labels."""
    with open_text(path, settings) as text:
        is_multi = any(len(_FASTTEXT_LABEL.findall(line)) > 1 for line in text)
    with open_text(path, settings) as text:
        for line in filter(str.strip, text):
            labels: Any = _FASTTEXT_LABEL.findall(line)
            if not is_multi:
                labels = "".join(labels)
            yield {"text": _FASTTEXT_LABEL.sub("", line).strip(), "label": labels}


def conll_rows(path: Path, settings: TextSettings) -> Iterator[dict[str, Any]]:
    """CoNLL columns, `token ... tag`, blank lines between sentences: the `tokens` and `tags` of
    each sentence, and the number of its first `line`. Raises UserError for a line without a tag."""
    tokens: list[str] = []
    tags: list[str] = []
    with open_text(path, settings) as text:
        # a blank line ends the last sentence, too
        for number, line in enumerate(itertools.chain(text, ["\n"]), 1):
            fields = line.rstrip("\r\n").split(TAB)
            if len(fields) == 1 or not line.strip():
                fields = line.split()
            if not fields or fields[0] == "-DOCSTART-":
                if tokens:
                    yield {"tokens": tokens, "tags": tags, "line": number - len(tokens)}
                tokens, tags = [], []
                continue
            if len(fields) == 1 or not fields[0]:
                remedy = "a line is `token<TAB>tag`, and blank between sentences"
                raise UserError(
                    f"{path}, line {number}: {line.strip()[:40]!r} is not a token and its tag: "
                    f"{remedy}"
                )
            tokens.append(fields[0])
            tags.append(fields[-1].strip())


def files_by_class(folder: Path) -> list[Path]:
    """CLASS/NAME.txt, or without an ending. Raises UserError if there is none."""
    paths = folder.glob("[!.]*/[!.]*")
    files = [path for path in paths if path.suffix in ("", ".txt") and path.is_file()]
    if not files:
        raise UserError(
            f"{folder} is no file, and no folder with a folder of texts for each class: "
            "CLASS/NAME.txt"
        )
    return natsorted(files)


def rows_by_class(folder: Path, settings: TextSettings) -> Iterator[dict[str, Any]]:
    """A text for each file, its folder as the label, and its name. Raises UserError."""
    for path in files_by_class(folder):
        try:
            with open_text(path, settings) as text:
                content = text.read().strip()
        except UnicodeError as error:
            raise UserError(encoding_fault(path, settings.encoding)) from error
        file = str(path.relative_to(folder))
        yield {"text": content, "label": path.parent.name, "file": file}


def in_blocks(items: Iterable[Any], size: int | None = None) -> Iterator[list[Any]]:
    """Lists of `size` items, or BLOCK_ROWS; the last may be shorter."""
    iterator = iter(items)
    while block := list(itertools.islice(iterator, size or BLOCK_ROWS)):
        yield block


def check_columns(path: Path, names: list[str]) -> None:
    """Raises UserError for duplicate names."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{path} has more than one column {name!r}: rename them, or, if the first line is "
                "a row, pass --column_names"
            )


def read_csv(path: Path, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a CSV or TSV file. Raises UserError that names the line of a row with more or
    fewer cells than the header, or of a quote that is not closed at the end of its cell."""
    import pyarrow

    with open_text(path, settings) as text:
        delimiter = delimiter_of(path, settings)
        rows = _csv_rows(path, text, delimiter, settings)
        names = settings.header or _column_names(path, next(rows, []), settings)
        check_columns(path, names)
        first_row = 1
        for block in in_blocks(rows):
            columns = list(zip(*block, strict=True))
            if first_row == 1 and settings.header:
                _refuse_header_as_row(path, block[0])
            elif first_row == 1:
                _refuse_row_as_header(path, names, columns)
            if any("\n" in "".join(cells) for cells in columns):
                _refuse_swallowed_rows(path, block, first_row, delimiter)
            yield pyarrow.record_batch([pyarrow.array(cells) for cells in columns], names)
            first_row += len(block)


def _csv_rows(
    path: Path, text: io.TextIOWrapper, delimiter: str, settings: TextSettings
) -> Iterator[list[str]]:
    """The rows, blank lines left out, all as wide as the header or the first."""
    quoting: Any = csv.QUOTE_MINIMAL if settings.quoting == "csv" else csv.QUOTE_NONE
    lines: Iterable[str] = text
    character = delimiter
    if len(delimiter) > 1:
        character = _UNIT
        lines = (line.replace(delimiter, character) for line in text)
        quoting = csv.QUOTE_NONE
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(lines, delimiter=character, quoting=quoting, strict=True)
    width = len(settings.header)
    line = 1
    try:
        for cells in reader:
            if cells:
                width = width or len(cells)
                if len(cells) != width:
                    header = "--column_names" if settings.header else "the header"
                    remedy = "put cells with a delimiter or a line break in double quotes"
                    if settings.quoting == "none":
                        remedy += ", with --quoting csv"
                    if len(delimiter) > 1:
                        remedy = "correct that line"
                    if settings.header and line == 1:
                        remedy = f"pass --column_names with {len(cells)} names"
                    raise UserError(
                        f"{path}, line {line}: {len(cells)} cells where {header} has {width}: "
                        f"{advice(path, settings) or remedy}"
                    )
                yield cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line}: a double quote that begins a cell is not closed at its end, or "
            f"a lone carriage return (\\r) ends a row ({error}): where double quotes are part of "
            "the texts, pass --quoting none; else double them, and quote the cell with \\r"
        ) from error


def _column_names(path: Path, cells: list[str], settings: TextSettings) -> list[str]:
    """The names in a header line. Raises UserError for an empty one, and where the file is not a
    table with this delimiter."""
    if not any(cells):
        raise UserError(f"{path} is empty, or its first line is: write the columns there")
    if cells[0].lower().startswith("sep="):
        fault = "begins with Excel's note of its delimiter"
        raise UserError(f"{path} {fault}: remove that line, and pass --delimiter")
    remedy = advice(path, settings)
    is_guess = len(cells) == 1 and settings.delimiter is None
    if remedy and (is_guess or is_json(cells)):
        raise UserError(f"{path} begins with the column {cells[0][:60]!r}: {remedy}")
    # pandas leaves the name of its index empty
    return [name or f"Unnamed: {place}" for place, name in enumerate(cells)]


def _refuse_header_as_row(path: Path, cells: list[str]) -> None:
    """Raises UserError if the first line holds usual names of a text and of a label."""
    if has_usual(cells, USUAL_TEXT) and has_usual(cells, USUAL_LABELS):
        fault = f"the first line is a header, {', '.join(cells)}"
        raise UserError(f"{path}: {fault}: leave out --column_names (or remove that line)")


def _refuse_row_as_header(path: Path, names: list[str], columns: list[Any]) -> None:
    """Raises UserError if the first line looks like a row: one of its cells is also in the column
    that it would name. Numbers may be names: of classes beside a text, or pandas' 0, 1, ..."""
    given = [name for name in names if not name.startswith("Unnamed")]
    has_numbers = given == list(map(str, range(len(given)))) or set(USUAL_TEXT) & set(given)
    for name, cells in zip(names, columns, strict=True):
        if has_numbers and name.isdecimal():
            continue
        if name in cells:
            raise UserError(
                f"{path}: the first line names the columns, and {name!r} is also the cell of row "
                f"{cells.index(name) + 1}: if that line is a row, pass --column_names with "
                f"{len(names)} names, else rename the column, or remove the row"
            )


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
