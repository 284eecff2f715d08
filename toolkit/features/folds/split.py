"""The rows of each fold, and the files in which a recipe gets them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from toolkit.data.table import BATCH_ROWS, Table
from toolkit.data.write import write_rows
from toolkit.utils.files import replace_file


def held_out_rows(
    texts: Sequence[str], labels: Iterable[str], folds: int, seed: int
) -> list[np.ndarray]:
    """The ascending rows of each fold: rows of the same text are in one, and classes are spread
    evenly. Raises ValueError for fewer texts than folds."""
    import pandas as pd
    from sklearn.model_selection import StratifiedGroupKFold

    groups = pd.factorize(np.array(texts, object))[0]
    classes = pd.factorize(np.array(list(labels), object))[0]
    if np.bincount(classes).max() < folds:  # numbers, which are all different
        classes = np.zeros_like(classes)
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    return [held_out for _, held_out in splitter.split(groups, classes, groups)]


def write_part(path: Path, table: Table, is_in_part: np.ndarray) -> None:
    """Writes some rows as Parquet. `is_in_part`: (rows,) bool."""
    rows = table.rows.with_format("arrow")
    slices = [slice(start, start + BATCH_ROWS) for start in range(0, len(table), BATCH_ROWS)]
    tables = (rows[part].filter(is_in_part[part]) for part in slices)
    with replace_file(path) as draft:
        write_rows(draft, path, tables)
