"""The predictions of all folds, and their page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from toolkit.data.table import Table
from toolkit.errors import UserError
from toolkit.features.folds.suspects import cells_by_label, find_suspects
from toolkit.report.files import write_atomically, write_lines
from toolkit.report.record import Record
from toolkit.report.templates import render


def predictions(
    folder: Path, fold: int, rows: np.ndarray, texts: Sequence[str]
) -> list[dict[str, Any]]:
    """The predictions of a fold's run, with the rows of the whole file as ids. Raises UserError for
    a run whose last evaluation is not of its part."""
    run = folder / f"fold-{fold}"
    record = Record.load(run)
    lines = list(record.predictions())
    if record.last.split != "validation" or not lines:
        why = "its last evaluation is not of the rows that it was trained without"
        raise UserError(f"{run}: {why}: leave out --test_file")
    for line in lines:
        line["id"] = int(rows[line["id"]])
        line |= {"fold": fold, "text": texts[line["id"]]}
    return lines


def write_page(folder: Path, table: Table, lines: list[dict[str, Any]], folds: int) -> str:
    """Writes out_of_fold.jsonl, label_errors.jsonl and report.html from the predictions of all
    folds, and returns what to print."""
    records = [Record.load(folder / f"fold-{fold}") for fold in range(1, folds + 1)]
    lines.sort(key=lambda line: line["id"])
    write_lines(folder / "out_of_fold.jsonl", lines)
    suspects = find_suspects(lines, records[0].data)
    cells = cells_by_label(lines, suspects, table, records[0].data)
    for line in suspects:
        line |= {"data": table.digest, "cells": cells[json.dumps(line["prediction"])]}
    write_lines(folder / "label_errors.jsonl", suspects)
    means = (
        pd.DataFrame([record.last.single_numbers for record in records]).mean().to_dict()
    )
    context = {
        "folder": folder.resolve().name,
        "record": records[0],
        "records": records,
        "means": means,
        "count": len(lines),
        "suspects": suspects,
        "cells": cells,
    }
    page = render(Path(__file__).with_name("folds.html"), context)
    write_atomically(folder / "report.html", [page])
    results = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
    return f"""{len(lines)} rows out of fold, mean of {folds} folds: {results}
suspected labels: {len(suspects)}
  {folder}/report.html         review them, and save corrections
  {folder}/label_errors.jsonl   the same as corrections, all accepted
  {folder}/out_of_fold.jsonl   every row with its out-of-fold probabilities
next:
  toolkit correct-labels TRAIN_FILE corrections.jsonl OUTPUT"""
