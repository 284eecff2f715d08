"""Rows -> a CSV, TSV, JSON, JSONL or Parquet file that `read.py` reads as the same rows."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toolkit.data.label_cells import to_float
from toolkit.data.text_files import CONLL, DELIMITERS, OPENERS, format_of
from toolkit.errors import UserError

_FORMULA = re.compile(r"\s*[=+@＝＋＠－-].", re.DOTALL)


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
    opener = OPENERS.get(output.suffix.lower(), open)
    try:
        with opener(draft, "wt", encoding=encoding, newline="") as file:
            if kind in DELIMITERS:
                _write_csv(file, tables, DELIMITERS[kind], quoting)
            elif kind == ".json":
                _write_list(file, tables)
            else:
                file.writelines(f"{line}\n" for line in _json_lines(tables))
    except (UnicodeEncodeError, LookupError) as error:
        remedy = "name an output that ends in .parquet"
        raise UserError(
            f"--encoding {encoding} cannot write {output}: {error}: {remedy}"
        ) from error
    except csv.Error as error:
        why = "--quoting none cannot write a cell that contains the delimiter"
        raise UserError(f"{output}: {why}: name an output that ends in .jsonl") from error


def without_formula(cell: Any) -> Any:
    """A text that a spreadsheet would compute, such as `=HYPERLINK(...)`, with an apostrophe before
    it, which makes it a text; others, and numbers, as they are."""
    if isinstance(cell, str) and _FORMULA.match(cell) and to_float(cell) is None:
        return f"'{cell}"
    return cell


def output_format(path: Path) -> str:
    """The format of a file to write. Raises UserError for one that is read only."""
    kind = format_of(path)
    if kind in (".txt", *CONLL):
        raise UserError(f"{path}: name it .csv, .tsv, .json, .jsonl or .parquet")
    return kind


def _write_parquet(path: Path, tables: Iterable[Any]) -> None:
    """All tables get the columns and types of the first."""
    import pyarrow.parquet

    writer: Any = None
    with contextlib.ExitStack() as stack:
        for table in tables:
            if writer is None:
                writer = stack.enter_context(
                    pyarrow.parquet.ParquetWriter(path, table.schema)
                )
            writer.write_table(table.cast(writer.schema))


def _write_csv(file: Any, tables: Iterable[Any], delimiter: str, quoting: bool) -> None:
    """Lists and objects are JSON in a cell."""
    # where lines end in \n alone, csv does not quote a lone \r, which readers take for a row's end
    lines: Any = SimpleNamespace(
        write=lambda row: file.write(row.removesuffix("\r\n") + "\n")
    )
    style: dict[str, Any] = {}
    if not quoting:
        style = {"quoting": csv.QUOTE_NONE, "quotechar": None}
    writer = csv.writer(lines, delimiter=delimiter, lineterminator="\r\n", **style)
    has_header = False
    for table in tables:
        if not has_header:
            writer.writerow(table.column_names)
            has_header = True
        columns = [column.to_pylist() for column in table.columns]
        for row in zip(*columns, strict=True):
            writer.writerow(
                _as_json(cell) if isinstance(cell, list | dict) else cell for cell in row
            )


def _write_list(file: Any, tables: Iterable[Any]) -> None:
    """A JSON list, a row on each line."""
    separator = ""
    file.write("[")
    for line in _json_lines(tables):
        file.write(separator + line)
        separator = ",\n"
    file.write("]\n")


def _json_lines(tables: Iterable[Any]) -> Iterator[str]:
    for table in tables:
        yield from map(_as_json, table.to_pylist())


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
