"""Rows -> a CSV, TSV, JSON, JSONL or Parquet file that `read.py` reads as the same rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toolkit.data.read import format_of
from toolkit.data.text_files import DELIMITERS, OPENERS
from toolkit.errors import UserError


def write_rows(
    draft: Path,
    output: Path,
    tables: Iterable[Any],
    encoding: str = "utf-8",
    quoting: bool = True,
) -> None:
    """Writes pyarrow tables one after another to `draft`, in the format that `output` names;
    `quoting`: False writes CSV and TSV as `--quoting none` reads them. Raises UserError for a cell
    that the encoding or the format cannot hold."""
    kind = output_format(output)
    if kind == ".parquet":
        _write_parquet(draft, tables)
        return
    lines: Iterator[str] = _json_lines(tables)
    if kind in DELIMITERS:
        lines = _csv_lines(tables, DELIMITERS[kind], quoting)
    elif kind == ".json":
        lines = _as_list(lines)
    opener = OPENERS.get(output.suffix.lower(), open)
    try:
        with opener(draft, "wt", encoding=encoding, newline="") as file:
            file.writelines(lines)
    except (UnicodeEncodeError, LookupError) as error:
        raise UserError(
            f"--encoding {encoding} cannot write {output}: {error}; use utf-8"
        ) from error
    except csv.Error as error:
        why = "--quoting none cannot write a cell that contains the delimiter"
        raise UserError(f"{output}: {why}: name an output that ends in .jsonl") from error


def output_format(path: Path) -> str:
    """The format of a file to write. Raises UserError for one that is read only."""
    kind = format_of(path)
    if kind == ".txt":
        raise UserError(f"{path}: name it .csv, .tsv, .json, .jsonl or .parquet")
    return kind


def _write_parquet(path: Path, tables: Iterable[Any]) -> None:
    import pyarrow.parquet

    writer = None
    try:
        for table in tables:
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table.cast(writer.schema))
    finally:
        if writer is not None:
            writer.close()


def _rows(table: Any) -> Iterator[tuple[Any, ...]]:
    """Bytes, which older Spark wrote for strings, are text."""
    columns = []
    for column in table.columns:
        cells = column.to_pylist()
        if cells and any(isinstance(cell, bytes) for cell in cells):
            cells = [cell and cell.decode(errors="backslashreplace") for cell in cells]
        columns.append(cells)
    return zip(*columns, strict=True)


def _json_lines(tables: Iterable[Any]) -> Iterator[str]:
    for table in tables:
        for row in _rows(table):
            yield f"{_as_json(dict(zip(table.column_names, row, strict=True)))}\n"


def _as_list(lines: Iterable[str]) -> Iterator[str]:
    before = "["
    for line in lines:
        yield before + line.rstrip("\n")
        before = ",\n"
    yield "]\n"


def _csv_lines(tables: Iterable[Any], delimiter: str, quoting: bool) -> Iterator[str]:
    """Lists and objects are JSON in a cell."""
    written: list[str] = []
    sink: Any = SimpleNamespace(write=written.append)
    style: dict[str, Any] = {"quoting": csv.QUOTE_MINIMAL}
    if not quoting:
        style = {"quoting": csv.QUOTE_NONE, "quotechar": None}
    # a cell with a lone \r, which readers take for the end of a row, is quoted only if lines end
    # in \r, too
    writer = csv.writer(sink, delimiter=delimiter, lineterminator="\r\n", **style)
    has_header = False
    for table in tables:
        if not has_header:
            writer.writerow(table.column_names)
            has_header = True
        for row in _rows(table):
            writer.writerow([_cell(cell) for cell in row])
        yield from (line.removesuffix("\r\n") + "\n" for line in written)
        written.clear()


def _cell(cell: Any) -> Any:
    if isinstance(cell, list | dict):
        return _as_json(cell)
    return cell


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
