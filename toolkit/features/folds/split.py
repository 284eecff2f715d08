"""The rows of each fold, and the files in which a recipe gets them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    groups = pd.factorize(np.array(texts, object))[0]
    classes = pd.factorize(np.array(list(labels), object))[0]
    kind: Any = StratifiedGroupKFold
    if np.bincount(classes).max() < folds:  # numbers, which are all different
        kind = GroupKFold
    splitter = kind(folds, shuffle=True, random_state=seed)
    return [held_out for _, held_out in splitter.split(groups, classes, groups)]


def texts_of(table: Table, columns: Sequence[str]) -> list[str]:
    """The text of each row; those of a pair on two lines."""
    texts: list[str] = []
    for block in table.text_blocks(columns, " "):
        texts += ["\n".join(row) for row in zip(*block, strict=True)]
    return texts


def write_part(path: Path, table: Table, rows: np.ndarray) -> None:
    """Writes these rows as Parquet."""
    part = table.rows.select(rows).with_format("arrow")
    with replace_file(path) as draft:
        write_rows(draft, path, part.iter(BATCH_ROWS))
