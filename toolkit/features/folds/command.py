"""`toolkit folds RECIPE`: trains a model for each fold, and reports labels that are probably
wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.config import TextSettings
from toolkit.data.columns import find_texts, require_columns
from toolkit.data.labels import USUAL
from toolkit.data.read import read_file
from toolkit.data.table import Table
from toolkit.errors import UserError
from toolkit.evaluation.saved_model import training_run
from toolkit.features.folds.page import predictions, write_page
from toolkit.features.folds.split import held_out_rows, write_part
from toolkit.report.recipe_runs import RecipeRuns
from toolkit.utils.extras import require_extra

_PASSED = ("train_file", "text_column", "text_pair", "label_column")
"""The options of this command that the recipe gets, too."""


def run(options: argparse.Namespace, words: list[str]) -> None:
    """`words`: the recipe's arguments. Raises UserError."""
    require_extra("toolkit folds", "folds", "cleanlab")
    folder = Path(options.output_dir or f"runs/folds-{Path(options.recipe).stem}")
    values = {name: value for name, value in vars(options).items() if value is not None}
    passed = [f"--{name}={values[name]}" for name in _PASSED if name in values]
    runs = RecipeRuns(options.recipe, [*words, *passed], folder)
    settings = runs.settings | values
    table = _read(settings, reading_settings(options))
    labels = require_columns(table, settings.get("label_column"), "label_column", USUAL)
    columns = find_texts(table, settings.get("text_column"), settings.get("text_pair"), labels)
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


def reading_settings(options: argparse.Namespace) -> TextSettings:
    """How a file is read."""
    return TextSettings(
        encoding=options.encoding,
        delimiter=options.delimiter,
        quoting=options.quoting,
        column_names=options.column_names,
    )


def _read(settings: dict[str, Any], reading: TextSettings) -> Table:
    """The labelled rows. Raises UserError for settings by which not every row would be predicted
    by a model that has not seen its label."""
    if not settings.get("train_file"):
        remedy = "write a data set of the hub to a file (`to_parquet` of `datasets`)"
        raise UserError(f"toolkit folds needs --train_file FILE: {remedy}")
    for name in ("test_file", "max_eval_samples"):
        if settings.get(name):
            why = "each fold is evaluated on its part of the training rows"
            raise UserError(f"--{name} does not fit ({why}): leave it out")
    table = read_file(settings["train_file"], reading)
    for name in ("model_name_or_path", "teacher"):
        data = training_run(str(settings.get(name)))["data"]
        if data.get("labels") and data.get("file_digests", {}).get("train") == table.digest:
            why = "was trained on the labels of these rows, which it would predict again"
            remedy = "take the model that it was fine-tuned from"
            raise UserError(f"--{name} {settings[name]} {why}: {remedy}")
    return table


def _run_fold(runs: RecipeRuns, fold: int, table: Table, rows: np.ndarray) -> None:
    train_file = runs.folder / f"fold-{fold}.train.parquet"
    validation_file = runs.folder / f"fold-{fold}.validation.parquet"
    is_held_out = np.isin(np.arange(len(table)), rows)
    write_part(train_file, table, ~is_held_out)
    write_part(validation_file, table, is_held_out)
    runs.run(f"fold-{fold}", {"train_file": train_file, "validation_file": validation_file})
