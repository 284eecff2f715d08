"""`toolkit folds RECIPE`: trains a model for each fold, and reports labels that are probably
wrong."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.columns import USUAL_LABELS, find_texts, require_columns
from toolkit.data.options import READING, reading_settings
from toolkit.data.read import read_file
from toolkit.data.table import BATCH_ROWS, Table
from toolkit.data.write import write_rows
from toolkit.errors import UserError
from toolkit.evaluation.saved_model import training_run
from toolkit.features.folds.page import predictions, write_page
from toolkit.report.recipe_runs import RecipeRuns
from toolkit.utils.extras import require_extra
from toolkit.utils.files import replace_file

_PASSED = ("train_file", "text_column", "text_pair", "label_column")
"""The options of this command that the recipe gets, too."""


def run(options: argparse.Namespace, words: list[str]) -> None:
    """`words`: the recipe's arguments. Raises UserError."""
    require_extra("toolkit folds", "folds", "cleanlab")
    folder = Path(options.output_dir or f"runs/folds-{Path(options.recipe).stem}")
    given = {name: getattr(options, name) for name in _PASSED if getattr(options, name)}
    passed = [f"--{name}={value}" for name, value in given.items()]
    runs = RecipeRuns(options.recipe, [*words, *passed], folder)
    settings = {**runs.settings, **given}
    if not settings.get("train_file"):
        remedy = "write a data set of the hub to a file (`to_parquet` of `datasets`)"
        raise UserError(f"toolkit folds needs --train_file FILE: {remedy}")
    if settings.get("test_file"):
        raise UserError(
            "toolkit folds evaluates the rows of each fold: leave out --test_file"
        )
    reading = {name: settings[name] for name in READING if name in settings}
    table = read_file(settings["train_file"], reading_settings(options, **reading))
    _refuse_trained_models(settings, table)
    labels = require_columns(
        table, settings.get("label_column"), "label_column", USUAL_LABELS
    )
    columns = find_texts(
        table, settings.get("text_column"), settings.get("text_pair"), labels
    )
    blocks = table.read([",".join(columns)], "\n").texts()
    texts = [text for (block,) in blocks for text in block]
    cells = map(repr, table.rows.select_columns(list(labels)))
    seed = settings.get("data_seed") or settings.get("seed", 42)
    held_out = held_out_rows(texts, cells, options.folds, seed)
    lines: list[dict[str, Any]] = []
    with runs.locked():
        for fold, rows in enumerate(held_out, 1):
            _run_fold(runs, fold, table, rows)
            lines += predictions(folder, fold, rows, texts)
        report = write_page(folder, table, lines, len(held_out))
    print(report)


def _refuse_trained_models(settings: dict[str, Any], table: Table) -> None:
    """Raises UserError for a model that has seen the labels of the rows that it would predict."""
    for name in ("model_name_or_path", "teacher"):
        data = training_run(str(settings.get(name)))["data"]
        if data.get("labels") and data.get("file_digests", {}).get("train") == table.digest:
            why = "was trained on the labels of these rows, which it would predict again"
            remedy = "take the model that it was fine-tuned from"
            raise UserError(f"--{name} {settings[name]} {why}: {remedy}")


def _run_fold(runs: RecipeRuns, fold: int, table: Table, rows: np.ndarray) -> None:
    train_file = runs.folder / f"fold-{fold}.train.parquet"
    validation_file = runs.folder / f"fold-{fold}.validation.parquet"
    is_held_out = np.isin(np.arange(len(table)), rows)
    write_part(train_file, table, ~is_held_out)
    write_part(validation_file, table, is_held_out)
    runs.run(f"fold-{fold}", {"train_file": train_file, "validation_file": validation_file})


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
    slices = [
        slice(start, start + BATCH_ROWS) for start in range(0, len(table), BATCH_ROWS)
    ]
    tables = (rows[part].filter(is_in_part[part]) for part in slices)
    with replace_file(path) as draft:
        write_rows(draft, path, tables)
