"""`toolkit correct-labels FILE CORRECTIONS OUTPUT`: a copy of a file with corrected labels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from toolkit.data.read import format_of, parse_json, read_file
from toolkit.data.table import Table
from toolkit.data.write import output_format, write_rows
from toolkit.errors import UserError
from toolkit.features.folds.command import reading_settings
from toolkit.utils.files import explain_write_errors, replace_file


class Correction(pydantic.BaseModel):
    """A line of the file of corrections."""

    id: pydantic.NonNegativeInt
    """The row, from 0."""
    data: str
    """The digest of all rows, and of how they are read."""
    cells: dict[str, Any] | None
    """Column -> new cell; None leaves the row out."""


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
    print(f"{output}: {len(table) - left_out} rows, {changed} corrected, {left_out} left out")


def read_corrections(path: Path, table: Table) -> dict[int, dict[str, Any] | None]:
    """Row -> its new cells, or None to leave it out. Raises UserError for corrections of other
    rows, and for two of one row."""
    corrections: dict[int, dict[str, Any] | None] = {}
    for line in parse_json(path):
        correction = Correction.model_validate(line)
        known = set(correction.cells or ()) <= set(table.rows.column_names)
        if correction.data != table.digest or correction.id >= len(table) or not known:
            why = f"{table.name} has other content, or was read with other options"
            raise UserError(f"{path}: id {correction.id} is of other data: {why}")
        if correction.id in corrections:
            raise UserError(f"{path}: id {correction.id} has two corrections: remove one")
        corrections[correction.id] = correction.cells
    return corrections


def corrected(table: Table, corrections: Mapping[int, dict[str, Any] | None]) -> Iterator[Any]:
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
