"""JSON and JSONL files -> batches of rows, with errors that name the line or the row."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toolkit.config import TextSettings
from toolkit.data.text_files import (
    check_column_names,
    in_batches,
    open_text,
    split_lines,
    unify_schemas,
)
from toolkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_UNFIT = (
    ValueError,
    TypeError,
    NotImplementedError,
    OverflowError,
    RecursionError,
)  # pyarrow's errors are of these
_JSON_CHARACTERS = 1 << 20
_JSON_SPACE = re.compile(r"[ \t\r\n]*")


def read_json(
    path: Path, settings: TextSettings, kind: str
) -> tuple[str, Iterator[pyarrow.RecordBatch]]:
    """(a note if rows are lists, or --column_names is ignored; batches of the rows, whose columns and types widen
    from batch to batch)."""
    batches = in_batches(parse_json(path, kind, settings.encoding))
    first = next(batches, [])
    columns = _columns_of_lists(path, settings, first)
    note = f"without --column_names {settings.column_names}: its rows have names" * bool(
        settings.column_names
    )
    if columns:
        note = (
            f"rows [{', '.join(columns)}], lists without names (--column_names gives them others)"
        )
    return note, _record_batches(path, columns, itertools.chain([first] * bool(first), batches))


def parse_json(path: Path, kind: str, encoding: str) -> Iterator[Any]:
    """The lines of a `.jsonl` file; of a `.json` file the items of a list, of `{"data": [items]}`, or its lines."""
    return _json_lines(path, encoding) if kind == ".jsonl" else _json(path, encoding)


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice in an object"
        )
    return items


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_duplicate_keys)


def _json_lines(path: Path, encoding: str) -> Iterator[Any]:
    with open_text(path, encoding, "\n") as text:
        for number, line in enumerate(split_lines(path, text), 1):
            if line.strip():
                try:
                    yield _DECODER.decode(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number}: not JSON ({error})") from error


def _json(path: Path, encoding: str) -> Iterator[Any]:
    """A list is read as a stream; anything else is first read whole."""
    try:
        with open_text(path, encoding) as file:
            yield from _stream_items(file)
        return
    except UnicodeError:
        raise
    except (ValueError, IndexError, RecursionError):
        pass  # not a list, or an invalid one: read it whole to name the fault
    yield from _whole_json(path, encoding)


def _stream_items(file: IO[str]) -> Iterator[Any]:
    """Reads the items of a JSON list lazily. Raises ValueError, IndexError or RecursionError for other files."""
    text, place = file.read(_JSON_CHARACTERS).lstrip(), 0
    if not text.startswith("["):
        raise ValueError
    while text[place] != "]":  # the character before an item
        try:
            item, end = _DECODER.raw_decode(text, _skip_space(text, place + 1))
            if text[end := _skip_space(text, end)] not in ",]":
                raise ValueError
        except (ValueError, IndexError):  # the item continues after what was read
            if not (more := file.read(max(_JSON_CHARACTERS, len(text) - place))):
                raise
            text, place = text[place:] + more, 0
            continue
        yield item
        place = end
    if text[place + 1 :].strip() or file.read().strip():
        raise ValueError


def _skip_space(text: str, start: int) -> int:
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
        if len(lines) > 1 and all(
            line.lstrip().startswith("{") and line.rstrip().endswith("}") for line in lines
        ):
            return _json_lines(path, encoding)
        raise UserError(f"{path}: not JSON ({error})") from error
    if isinstance(loaded, dict):
        lists = [value for value in loaded.values() if isinstance(value, list)]
        if len(lists) == len(loaded) == 1:
            return lists[0]
        if len(loaded) > 1 and (
            len(lists) == len(loaded) or all(isinstance(part, dict) for part in loaded.values())
        ):
            raise UserError(
                f"{path} is written by columns: write it by rows (pandas: to_json(orient='records'))"
            )
    return loaded if isinstance(loaded, list) else [loaded]


def _columns_of_lists(path: Path, settings: TextSettings, first: list[Any]) -> list[str]:
    """The columns if the first rows of the file are lists of one length; empty if they are objects."""
    if not first or not all(
        isinstance(row, list) and len(row) == len(first[0]) > 1 for row in first
    ):
        return []
    names = settings.header or _names_of_lists(list(zip(*first, strict=True)))
    check_column_names(path, names)
    if len(names) != len(first[0]):
        raise UserError(
            f"{path}: its rows have {len(first[0])} items, and --column_names names {len(names)}"
        )
    return names


def _record_batches(
    path: Path, columns: list[str], blocks: Iterable[list[Any]]
) -> Iterator[pyarrow.RecordBatch]:
    """Rows that are lists of these columns, or objects if there are none -> batches."""
    import pyarrow

    types: dict[str, pyarrow.DataType] = {}  # of each column in the rows so far
    first_row, width = 1, len(columns)
    for rows in blocks:
        for number, row in enumerate(rows, first_row):
            if not (
                isinstance(row, list) and len(row) == width if width else isinstance(row, dict)
            ):
                kind = f"a list of {width} items" if width else "an object with named fields"
                raise UserError(f"{path}, row {number}: not {kind} but {str(row)[:40]!r}")
        names = columns or list(dict.fromkeys(itertools.chain(types, *rows)))
        if not names:  # never after the first batch
            raise UserError(
                f"{path}, rows 1 to {len(rows)}: objects without fields, {{}}: remove them"
            )
        check_column_names(path, names)
        cells = (
            map(list, zip(*rows, strict=True))
            if width
            else ([row.get(name) for row in rows] for name in names)
        )
        arrays = {name: _array(values, types.get(name, pyarrow.null()), path, first_row, name)
                  for name, values in zip(names, cells, strict=True)}  # fmt: skip
        types = {name: array.type for name, array in arrays.items()}
        first_row += len(rows)
        yield pyarrow.record_batch(arrays)


def _names_of_lists(columns: Sequence[Sequence[Any]]) -> list[str]:
    """`text` and `label` for two columns: the text is the one of strings, or with more distinct values."""
    if len(columns) != 2:
        return [str(place) for place in range(1, len(columns) + 1)]
    first, second = (
        (all(isinstance(cell, str) for cell in column), len(set(map(str, column))))
        for column in columns
    )
    return ["text", "label"] if first >= second else ["label", "text"]


def _array(
    values: list[Any], before: pyarrow.DataType, path: Path, first_row: int, name: str
) -> pyarrow.Array:
    """The cells of a column in a type that also holds `before`, that of the rows before them. Raises UserError naming
    the first row, of those from `first_row` on, whose value has no common type with the rows before it."""
    import pyarrow

    def cast(count: int) -> pyarrow.Array | Exception:
        try:
            array = pyarrow.array(values[:count])
            schemas = (pyarrow.schema([("", kind)]) for kind in (before, array.type))
            return array.cast(unify_schemas(*schemas).field(0).type)
        except _UNFIT as error:
            return error

    array = cast(len(values))
    if not isinstance(array, Exception):
        return array
    place = bisect.bisect_left(
        range(len(values)), True, key=lambda place: isinstance(cast(place + 1), Exception)
    )
    fault = f"{path}, row {first_row + place}: field {name!r} is {str(values[place])[:40]!r}"
    if isinstance(array, UnicodeError):
        raise UserError(
            f"{fault}, which holds half a character (a lone surrogate): correct the text"
        ) from array
    raise UserError(
        f"{fault}, unlike the rows before it: make them all numbers, or all in quotes"
    ) from array
