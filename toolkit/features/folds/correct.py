"""`toolkit correct-labels FILE CORRECTIONS OUTPUT`: a copy of a file with corrected labels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from toolkit.data.read import format_of, read_file
from toolkit.data.table import Table
from toolkit.data.write import output_format, write_rows
from toolkit.errors import UserError
from toolkit.features.folds.command import reading_settings
from toolkit.features.folds.split import batches_of, row_digest
from toolkit.utils.files import explain_write_errors, replace_file


class Correction(pydantic.BaseModel):
    """A line of the file."""

    id: pydantic.NonNegativeInt
    """The row, from 0."""
    row_digest: str
    cells: dict[str, Any] | None
    """Column -> new cell; None leaves the row out."""


def run(options: argparse.Namespace) -> None:
    """Raises UserError for corrections of other rows, and for an output that exists."""
    output = Path(options.output)
    kind = output_format(output)
    if output.exists():
        raise UserError(f"{output} exists: name another file")
    settings = reading_settings(vars(options))
    table = read_file(options.file, settings)
    corrections = read_corrections(Path(options.corrections))
    beyond = [row for row in corrections if row >= len(table)]
    if beyond:
        rows = f"{table.name} has {len(table)} rows"
        raise UserError(f"{options.corrections}: id {beyond[0]}: {rows}")
    quoting = settings.quoting != "none" or kind != format_of(Path(options.file))
    with explain_write_errors(output), replace_file(output) as draft:
        write_rows(draft, output, corrected(table, corrections), settings.encoding, quoting)
    left_out = sum(correction.cells is None for correction in corrections.values())
    changed = len(corrections) - left_out
    print(f"{output}: {len(table) - left_out} rows, {changed} corrected, {left_out} left out")


def read_corrections(path: Path) -> dict[int, Correction]:
    """Row -> correction. Raises UserError naming an invalid line, or the second one of a row."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # texts may contain U+0085
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    corrections: dict[int, Correction] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            correction = Correction.model_validate_json(line)
        except pydantic.ValidationError:
            example = '{"id": 3, "row_digest": "...", "cells": {"label": "pos"}}'
            remedy = f"write {example} (cells null leaves the row out), as in label_errors.jsonl"
            raise UserError(f"{where}: {remedy}") from None
        if correction.id in corrections:
            raise UserError(f"{where}: id {correction.id} has two lines")
        corrections[correction.id] = correction
    return corrections


def corrected(table: Table, corrections: Mapping[int, Correction]) -> Iterator[Any]:
    """The corrected rows as pyarrow tables. Raises UserError naming a row that is another than when
    the corrections were made."""
    for start, batch in batches_of(table):
        kept = []
        columns = batch.to_pydict()
        for place in range(batch.num_rows):
            correction = corrections.get(start + place)
            if correction is None:
                kept.append(place)
                continue
            if row_digest(cells[place] for cells in columns.values()) != correction.row_digest:
                where = f"{table.where(start + place)} (id {start + place})"
                raise UserError(f"{where} has other cells: the corrections are of other data")
            if correction.cells is not None:
                kept.append(place)
                for name, cell in correction.cells.items():
                    columns[name][place] = cell
        yield _rebuilt(batch, columns).take(kept)


def _rebuilt(batch: Any, columns: Mapping[str, list[Any]]) -> Any:
    import pyarrow

    arrays = [pyarrow.array(columns[field.name], field.type) for field in batch.schema]
    return pyarrow.table(arrays, schema=batch.schema)
