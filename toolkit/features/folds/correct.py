"""`toolkit correct-labels FILE CORRECTIONS OUTPUT`: a copy of a file with corrected labels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.config import TextSettings
from toolkit.data.options import reading_settings
from toolkit.data.read import parse_json, read_file
from toolkit.data.table import Table
from toolkit.data.text_files import format_of
from toolkit.data.write import output_format, write_rows
from toolkit.errors import UserError
from toolkit.utils.files import explain_write_errors, replace_file

Corrections = Mapping[int, dict[str, Any] | None]
"""Row, from 0 -> its new cells by column; None leaves the row out."""


def run(options: argparse.Namespace) -> None:
    """Raises UserError for corrections of other rows, and for an output that exists."""
    output = Path(options.output)
    kind = output_format(output)
    if output.exists():
        raise UserError(f"{output} exists: name another file")
    settings = reading_settings(options)
    table = read_file(options.file, settings)
    corrections = read_corrections(Path(options.corrections), table)
    quoting = settings.quoting != "none" or kind != format_of(Path(options.file))
    with explain_write_errors(output), replace_file(output) as draft:
        write_rows(draft, output, corrected(table, corrections), settings.encoding, quoting)
    left_out = list(corrections.values()).count(None)
    changed = len(corrections) - left_out
    print(
        f"{output}: {len(table) - left_out} rows, {changed} corrected, {left_out} left out"
    )


def read_corrections(path: Path, table: Table) -> Corrections:
    """Each line of the file has the row as `id`, the digest of all rows and of how they are read as
    `data`, and the new `cells`. Raises UserError for corrections of other rows, and for two of one
    row."""
    corrections: dict[int, dict[str, Any] | None] = {}
    for number, line in enumerate(parse_json(path, TextSettings()), 1):
        if not isinstance(line, dict) or not line.keys() >= {"id", "data", "cells"}:
            remedy = "save the file again from the page of `toolkit folds`"
            raise UserError(
                f"{path}, line {number}: no correction with id, data and cells: {remedy}"
            )
        row, cells = line["id"], line["cells"]
        is_known = row < len(table) and set(cells or ()) <= set(table.rows.column_names)
        if line["data"] != table.digest or not is_known:
            why = f"{table.name} has other content, or was read with other options"
            raise UserError(f"{path}: id {row} is of other data: {why}")
        if row in corrections:
            raise UserError(f"{path}: id {row} has two corrections: remove one")
        corrections[row] = cells
    return corrections


def corrected(table: Table, corrections: Corrections) -> Iterator[Any]:
    """The corrected rows as pyarrow tables."""
    import pyarrow

    number = 0
    for batch in table.batches():
        rows = []
        for row in batch.to_pylist():
            cells = corrections.get(number, {})
            if cells is not None:
                rows.append(row | cells)
            number += 1
        yield pyarrow.Table.from_pylist(rows, schema=batch.schema)
