"""The rows of each fold: drawn, and written as files that a recipe reads."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.table import Table
from toolkit.data.tokens import join_pair
from toolkit.data.write import write_rows
from toolkit.errors import UserError
from toolkit.utils.files import replace_file


def held_out_rows(
    table: Table, texts: Sequence[str], label_columns: Sequence[str], folds: int, seed: int
) -> list[np.ndarray]:
    """The ascending rows of each fold: rows of the same text are in one, and classes are spread
    evenly. Raises UserError for fewer texts than folds."""
    import pandas as pd
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    groups = pd.factorize(np.asarray(texts, object))[0]
    if groups.max() + 1 < folds:
        why = f"{groups.max() + 1} different texts are too few"
        raise UserError(f"{table.name}: {why} for --folds {folds}")
    labels = [
        repr(row) for _, cells in table.cells(label_columns) for row in zip(*cells, strict=True)
    ]
    classes = pd.factorize(np.asarray(labels, object))[0]
    kind: Any = GroupKFold
    if np.bincount(classes).max() >= folds:  # not for numbers, which are all different
        kind = StratifiedGroupKFold
    splitter = kind(folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():  # of a class with fewer rows than folds
        warnings.simplefilter("ignore", UserWarning)
        return [held_out for _, held_out in splitter.split(groups, classes, groups)]


def texts_of(table: Table, text: str, pair: str | None) -> list[str]:
    """The text of each row; those of a pair as one."""
    columns = [column for column in (text, pair) if column]
    texts: list[str] = []
    for block in table.text_blocks(columns, " "):
        if pair:
            texts += [join_pair(*row) for row in zip(*block, strict=True)]
        else:
            texts += block[0]
    return texts


def write_part(path: Path, table: Table, rows: np.ndarray) -> None:
    """Writes these ascending rows as Parquet."""
    with replace_file(path) as draft:
        write_rows(draft, path, _selected(table, rows))


def _selected(table: Table, rows: np.ndarray) -> Iterator[Any]:
    for start, batch in batches_of(table):
        first, end = np.searchsorted(rows, [start, start + batch.num_rows])
        yield batch.take(rows[first:end] - start)


def batches_of(table: Table) -> Iterator[tuple[int, Any]]:
    """(first row, pyarrow table) of each batch."""
    import pyarrow

    start = 0
    for batch in table.batches():
        if not isinstance(batch, pyarrow.Table):
            batch = pyarrow.Table.from_batches([batch])
        yield start, batch
        start += batch.num_rows


def row_digest(cells: Any) -> str:
    """Detects corrections of another row: of the cells of all columns."""
    text = json.dumps(list(cells), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
