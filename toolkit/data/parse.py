"""One file -> batches of rows, with errors that name the line or the row; what is read is never whole in memory.

Cells of CSV and TSV stay as they are written: a reader that guesses types makes `01` a number in one file
and a text in the next, `null` nothing, and a column's meaning dependent on its other rows.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toolkit.config import TextSettings
from toolkit.data.opening import MOST_CELL, OPENERS, bad_encoding, lines_of, most_bytes, open_text, too_large
from toolkit.errors import UserError, first_line, listing
from toolkit.utils.memory import limit_memory

if TYPE_CHECKING:
    import pyarrow

_UNFIT = (ValueError, TypeError, NotImplementedError, OverflowError, RecursionError)  # pyarrow's errors are of these
_MOST_COLUMNS = 10_000
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
BATCH_ROWS = 2048
_JSON_CHARACTERS = 1 << 20
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")


def format_of(path: Path) -> str:
    """`reviews.csv.gz` -> `.csv`. Raises UserError for an ending without a reader."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in OPENERS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise UserError(f"{path}: its format is unclear: name it {', '.join(FORMATS)} (also with .gz after it)")
    return suffixes[-1]


def read_batches(path: Path, settings: TextSettings) -> tuple[str, Iterator[pyarrow.RecordBatch]]:
    """(how the file is read, where a setting or its form decides that; its rows, at most BATCH_ROWS at a time).

    Of a JSON file, columns and their types widen from batch to batch. Raises UserError when the file is broken, has no
    rows or is in another encoding."""
    with _encoding_named(path, settings.encoding):
        note, batches = _open(path, settings)
    return f"{path}: {note}" if note else "", _checked(path, settings, batches)


@contextlib.contextmanager
def _encoding_named(path: Path, encoding: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        raise UserError(bad_encoding(path, encoding)) from error


def _checked(
    path: Path, settings: TextSettings, batches: Iterable[pyarrow.RecordBatch]
) -> Iterator[pyarrow.RecordBatch]:
    rows = 0
    with _encoding_named(path, settings.encoding):
        for batch in batches:
            rows += batch.num_rows
            yield batch
    if not rows:
        raise UserError(f"{path} has a header and no rows" if format_of(path) in _DELIMITERS else f"{path} has no rows")


def _open(path: Path, settings: TextSettings) -> tuple[str, Iterable[pyarrow.RecordBatch]]:
    kind = format_of(path)
    if kind == ".parquet":
        return "", _parquet(path)
    if kind in _DELIMITERS or (kind == ".txt" and settings.delimiter):
        names = [name for name in ("delimiter", "column_names") if getattr(settings, name)]
        ways = [f"--{name} {getattr(settings, name)}" for name in names]
        ways += ["--quoting none: double quotes are part of the texts"] * (settings.quoting == "none")
        return f"read with {', '.join(ways)}" * bool(ways), _separated(path, settings, _separator(settings, kind))
    if kind == ".txt":
        unit = {"line": "one text per line", "paragraph": "texts between blank lines"}[settings.sample_by]
        return unit, _lines(path, settings)
    rows = iter(_json_lines(path, settings.encoding) if kind == ".jsonl" else _json(path, settings.encoding))
    first = list(itertools.islice(rows, BATCH_ROWS))
    records = _Records(path, settings, first)
    lists = f"rows [{', '.join(records.names)}], lists without names (--column_names gives them others)"
    return lists if records.names else "", map(records.batch, itertools.chain([first] * bool(first), _blocks(rows)))


def _blocks(items: Iterable[Any]) -> Iterator[list[Any]]:
    some = iter(items)
    return iter(lambda: list(itertools.islice(some, BATCH_ROWS)), [])


def read_json(path: Path) -> list[Any]:
    """The entries of a JSON or JSONL file, or the lines of a text."""
    kind = format_of(path)
    with _encoding_named(path, "utf-8"):
        if kind in (".json", ".jsonl"):
            return list(_json_lines(path, "utf-8") if kind == ".jsonl" else _json(path, "utf-8"))
        with open_text(path, "utf-8") as text:
            return [line.strip() for line in lines_of(path, text) if line.strip()]


def _parquet(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """A file of a few kB may describe gigabytes: its own statistics are checked first, and need not be true."""
    import pyarrow
    import pyarrow.parquet

    most, size = most_bytes(path), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_names(path, file.schema_arrow.names)
            if sum(file.metadata.row_group(place).total_byte_size for place in range(file.num_row_groups)) > most:
                raise too_large(path, most)
            batches = file.iter_batches(batch_size=BATCH_ROWS)
            while True:
                with limit_memory(most):
                    batch = next(batches, None)
                if batch is None:
                    return
                size += batch.nbytes
                if size > most:
                    raise too_large(path, most)
                yield batch
    except MemoryError as error:
        raise too_large(path, most) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raises UserError for column names that occur twice, or that no table can have, and for too many."""
    if len(names) > _MOST_COLUMNS:
        raise UserError(
            f"{path} has {len(names)} columns, and at most {_MOST_COLUMNS} are read: keep those with the texts and the "
            "labels"
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
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
    delimiter = {"\\t": "\t", "tab": "\t"}.get(str(settings.delimiter), settings.delimiter)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise UserError(f"--delimiter {settings.delimiter!r}: give one character, or tab")
    return delimiter or _DELIMITERS[kind]


def _column_names(settings: TextSettings) -> list[str]:
    return [name.strip() for name in (settings.column_names or "").split(",") if name.strip()]


def _lines(path: Path, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    with open_text(path, settings.encoding, "\n") as text:
        lines: Iterable[str] = (line.removesuffix("\n").removesuffix("\r") for line in lines_of(path, text))
        if settings.sample_by == "paragraph":
            groups = itertools.groupby(lines, key=lambda line: bool(line.strip()))
            lines = ("\n".join(group).strip() for filled, group in groups if filled)
        for texts in _blocks(lines):
            yield pyarrow.record_batch({"text": pyarrow.array(texts, "string")})


def _separated(path: Path, settings: TextSettings, separator: str) -> Iterator[pyarrow.RecordBatch]:
    """Raises UserError naming the line of a row that does not fit the header, or where a quote takes in rows."""
    import pyarrow

    names = _column_names(settings)
    for rows, starts in _cells(path, settings, separator):
        if not names:
            names, rows, starts = rows[0], rows[1:], starts[1:]
        names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
        _check_names(path, names)
        widths = set(map(len, rows))
        if max(widths, default=0) > len(names):
            row = next(row for row, cells in enumerate(rows) if len(cells) > len(names))
            way = f"put texts that contain {separator!r} in quotes, and double quotes within them"
            raise UserError(
                f"{path}, line {starts[row]}: {len(rows[row])} cells where the header has {len(names)}: "
                f"{way if settings.quoting == 'csv' else 'pass --quoting csv, or another --delimiter'}"
            )
        if widths != {len(names)}:
            rows = [[*row, *[""] * (len(names) - len(row))] for row in rows]
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        yield pyarrow.record_batch([pyarrow.array(column, "string") for column in columns], names)
    if not names:
        raise UserError(f"{path} is empty: it holds no columns")


def _cells(path: Path, settings: TextSettings, separator: str) -> Iterator[tuple[list[list[str]], Sequence[int]]]:
    """(rows that are not blank, the line that each starts on), some at a time."""
    csv.field_size_limit(MOST_CELL)
    quoting: Any = csv.QUOTE_NONE if settings.quoting == "none" else csv.QUOTE_MINIMAL
    seen: list[str] = []
    ended, filled = 0, int(bool(settings.column_names))
    with open_text(path, settings.encoding) as text:
        lines = (seen.append(line) or line for line in lines_of(path, text))  # type: ignore[func-returns-value]
        reader = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
        while True:
            rows: list[list[str]] = []
            seen.clear()
            try:
                rows.extend(itertools.islice(reader, BATCH_ROWS))  # what was read before an error stays in it
            except csv.Error as error:
                ends = "end of data" in str(error) or "field limit" in str(error)
                fault = "is never closed" if ends else f"is followed by more text on line {reader.line_num}"
                start, number = ended + sum(map(_height, rows)) + 1, filled + sum(map(_is_filled, rows))
                raise UserError(
                    f"{path}, line {start} (row {number}): a double quote that begins a cell {fault}: where double "
                    "quotes are part of the texts, pass --quoting none; else close it at the end of the cell, or "
                    'double it ("")'
                ) from error
            if not rows:
                return
            starts: Sequence[int] = range(ended + 1, reader.line_num + 1)
            if len(starts) > len(rows):
                starts = list(itertools.accumulate(map(_height, rows[:-1]), initial=ended + 1))
                _refuse_swallowed(path, seen, separator, rows, starts, filled)
            if min(map(len, rows)) < 2:
                places = [place for place, row in enumerate(rows) if _is_filled(row)]
                rows, starts = [rows[place] for place in places], [starts[place] for place in places]
            ended, filled = reader.line_num, filled + len(rows)
            if rows:
                yield rows, starts


def _is_filled(row: list[str]) -> bool:
    return len(row) > 1 or (len(row) == 1 and not row[0].isspace())


def _height(row: list[str]) -> int:
    """The lines that a row takes."""
    return 1 + sum(len(_LINE_BREAK.findall(cell)) for cell in row)


def _refuse_swallowed(
    path: Path, lines: list[str], separator: str, rows: list[list[str]], starts: Sequence[int], filled: int
) -> None:
    """A quote that is not closed can end at another row's by chance. Then each line of the cell is a row by itself:
    it has the header's cells, and in some column a value that other rows have there."""
    heights = list(map(_height, rows))
    width = max(map(len, rows))
    for place, row in enumerate(rows):
        if heights[place] == 1:
            continue
        first = starts[place] - starts[0]
        parts = [line.rstrip("\r\n").split(separator) for line in lines[first : first + heights[place]]]
        if {len(part) for part in parts} != {width}:
            continue
        for column in range(width):
            values = {
                row[column] for other, row in enumerate(rows)
                if filled + other and heights[other] == 1 and column < len(row)
            }  # fmt: skip
            if all(part[column].strip() and part[column] in values for part in parts):
                number = filled + sum(map(_is_filled, rows[:place]))
                raise UserError(
                    f"{path}, line {starts[place]} (row {number}): a double quote that begins a cell takes in the rows "
                    f"up to line {starts[place] + heights[place] - 1}: where double quotes are part of the texts, pass "
                    "--quoting none; else double it"
                )


# --- JSON


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return items


_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)


def _json_lines(path: Path, encoding: str) -> Iterator[Any]:
    with open_text(path, encoding, "\n") as text:
        for number, line in enumerate(lines_of(path, text), 1):
            if line.strip():
                try:
                    yield _DECODER.decode(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number}: not JSON ({error})") from error


def _json(path: Path, encoding: str) -> Iterator[Any]:
    """A list of rows; `{"data": [rows]}`, which is whole in memory; or, under this name too, a row a line."""
    try:
        with open_text(path, encoding) as file:
            yield from _items(file)
        return
    except UnicodeError:
        raise
    except (ValueError, IndexError, RecursionError):
        pass  # no list, or a broken one: read whole, so that the fault is named
    yield from _whole_json(path, encoding)


def _items(file: IO[str]) -> Iterator[Any]:
    """The items of a list of JSON, read as they are consumed. Raises ValueError, IndexError and RecursionError where
    the file holds anything else."""
    text, place = file.read(_JSON_CHARACTERS).lstrip(), 0
    if not text.startswith("["):
        raise ValueError
    while text[place] != "]":  # the character before an item
        try:
            item, end = _DECODER.raw_decode(text, _end_of_space(text, place + 1))
            if text[end := _end_of_space(text, end)] not in ",]":
                raise ValueError
        except (ValueError, IndexError):  # the item goes on beyond what was read; more each time
            if not (more := file.read(max(_JSON_CHARACTERS, len(text) - place))):
                raise
            text, place = text[place:] + more, 0
            continue
        yield item
        place = end
    if text[place + 1 :].strip() or file.read().strip():
        raise ValueError


def _end_of_space(text: str, start: int) -> int:
    space = _JSON_SPACE.match(text, start)
    return space.end() if space else start


def _whole_json(path: Path, encoding: str) -> Iterable[Any]:
    with open_text(path, encoding) as file:
        text = file.read()
    if not text.strip():
        raise UserError(f"{path} is empty")
    try:
        loaded = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.split("\n") if line.strip()]
        if len(lines) > 1 and all(line.lstrip().startswith("{") and line.rstrip().endswith("}") for line in lines):
            return _json_lines(path, encoding)
        raise UserError(f"{path}: not JSON ({error})") from error
    if isinstance(loaded, dict):
        lists = [value for value in loaded.values() if isinstance(value, list)]
        if len(lists) == len(loaded) == 1:
            return lists[0]
        if len(loaded) > 1 and (len(lists) == len(loaded) or all(isinstance(part, dict) for part in loaded.values())):
            raise UserError(f"{path} is written by columns: write it by rows (pandas: to_json(orient='records'))")
    return loaded if isinstance(loaded, list) else [loaded]


class _Records:
    """Rows that are objects, or lists of one length -> batches."""

    def __init__(self, path: Path, settings: TextSettings, first: list[Any]) -> None:
        """`first`: the first rows of the file, which decide whether all are lists."""
        self.path, self.rows = path, 0
        self.names: list[str] = []
        """Of the items, where rows are lists."""
        self.types: dict[str, pyarrow.DataType] = {}
        """Of each column, by the values of the rows so far."""
        if first and all(isinstance(row, list) and len(row) == len(first[0]) > 1 for row in first):
            self.names = _column_names(settings) or _names_of_lists(list(zip(*first, strict=True)))
            _check_names(path, self.names)
            if len(self.names) != len(first[0]):
                raise UserError(
                    f"{path}: its rows have {len(first[0])} items, and --column_names names {len(self.names)}"
                )

    def batch(self, rows: list[Any]) -> pyarrow.RecordBatch:
        import pyarrow

        if width := len(self.names):
            self._refuse_odd(rows, lambda row: isinstance(row, list) and len(row) == width, f"a list of {width} items")
            names, columns = self.names, list(map(list, zip(*rows, strict=True)))
        else:
            self._refuse_odd(rows, lambda row: isinstance(row, dict), "an object with named fields")
            names = list(dict.fromkeys([*self.types, *(name for row in rows for name in row)]))
            _check_names(self.path, names)
            columns = [[row.get(name) for row in rows] for name in names]
        arrays = [self._column(name, column) for name, column in zip(names, columns, strict=True)]
        self.rows += len(rows)
        return pyarrow.record_batch(arrays, names)

    def _refuse_odd(self, rows: list[Any], fits: Callable[[Any], bool], kind: str) -> None:
        odd = next((place for place, row in enumerate(rows) if not fits(row)), None)
        if odd is not None:
            raise UserError(f"{self.path}, row {self.rows + odd + 1}: not {kind} but {str(rows[odd])[:40]!r}")

    def _column(self, name: str, values: list[Any]) -> pyarrow.Array:
        import pyarrow

        before = self.types.get(name, pyarrow.null())
        array = _array(values, before)
        if not isinstance(array, Exception):
            self.types[name] = array.type
            return array
        # the first row, from 1, that does not fit into one column with those before it
        counts = range(len(values) + 1)
        row = bisect.bisect_left(counts, True, key=lambda count: isinstance(_array(values[:count], before), Exception))
        fault = f"{self.path}, row {self.rows + row}: field {name!r} is {str(values[row - 1])[:40]!r}"
        if isinstance(array, UnicodeError):
            raise UserError(f"{fault}, which holds half a character (a lone surrogate): mend the text") from array
        raise UserError(f"{fault}, unlike the rows before it: make them all numbers, or all in quotes") from array


def _names_of_lists(columns: Sequence[Sequence[Any]]) -> list[str]:
    """Of two: the text is what is a string, or what differs most from row to row."""
    if len(columns) != 2:
        return [str(place) for place in range(1, len(columns) + 1)]
    first, second = ((all(isinstance(cell, str) for cell in column), len(set(map(str, column)))) for column in columns)
    return ["text", "label"] if first >= second else ["label", "text"]


def _array(values: list[Any], before: pyarrow.DataType) -> pyarrow.Array | Exception:
    """A column of these values and of others of a type."""
    import pyarrow

    try:
        array = pyarrow.array(values)
        return array.cast(wider(pyarrow.schema([("", before)]), pyarrow.schema([("", array.type)])).field(0).type)
    except _UNFIT as error:
        return error


def wider(first: pyarrow.Schema, second: pyarrow.Schema) -> pyarrow.Schema:
    """The columns of both, of types that hold both. Raises pyarrow's errors where there is none."""
    import pyarrow

    return first if first == second else pyarrow.unify_schemas([first, second], promote_options="permissive")
