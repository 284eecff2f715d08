"""`toolkit folds RECIPE`: trains a model for each fold, and reports labels that are probably
wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from toolkit.config import TextSettings
from toolkit.data.labels import USUAL
from toolkit.data.read import read_file
from toolkit.data.table import Table
from toolkit.errors import UserError
from toolkit.evaluation.saved_model import training_run
from toolkit.features.folds.page import write_page
from toolkit.features.folds.split import held_out_rows, texts_of, write_part
from toolkit.report.recipe_runs import RecipeRuns
from toolkit.utils.extras import require_extra

_READING = ("encoding", "delimiter", "quoting", "column_names")
_COLUMNS = ("text_column", "text_pair", "label_column")


def run(options: argparse.Namespace, words: list[str]) -> None:
    """`words`: the recipe's arguments. Raises UserError."""
    require_extra("toolkit folds", "folds", "cleanlab")
    if not 2 <= options.folds <= 100:
        raise UserError(f"--folds {options.folds}: give a number from 2 to 100")
    folder = Path(options.output_dir or f"runs/folds-{Path(options.recipe).stem}")
    words = list(words)
    for name in ("train_file", *_COLUMNS):
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name}={value}")
    runs = RecipeRuns(options.recipe, words, folder)
    settings = _merged(options, runs.settings)
    _check(settings, runs)
    table = read_file(settings["train_file"], reading_settings(settings))
    labels = table.find_columns(settings.get("label_column"), USUAL, "label_column")
    if not labels:
        raise table.ambiguous_column("label", "label_column", table.rows.column_names)
    text, pair = _text_columns(table, settings, labels)
    texts = texts_of(table, text, pair)
    seed = settings.get("data_seed") or settings.get("seed") or 42
    held_out = held_out_rows(table, texts, labels, options.folds, int(seed))
    with runs.locked():
        for fold, rows in enumerate(held_out, 1):
            _run_fold(runs, fold, table, rows)
        lines = write_page(folder, table, texts, labels, held_out)
    print("\n".join(lines))


def _merged(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe's settings, with the options that only this command reads."""
    given = {name: getattr(options, name) for name in ("train_file", *_COLUMNS, *_READING)}
    return settings | {name: value for name, value in given.items() if value is not None}


def reading_settings(settings: dict[str, Any]) -> TextSettings:
    """How a file is read."""
    values = {name: settings[name] for name in _READING if settings.get(name) is not None}
    return TextSettings(**values)


def _check(settings: dict[str, Any], runs: RecipeRuns) -> None:
    """Raises UserError for settings with which no row would be predicted by a model that has not
    seen its label."""
    file = settings.get("train_file")
    if not file:
        remedy = "write a data set of the hub to a file (`to_parquet` of `datasets`)"
        raise UserError(f"toolkit folds needs --train_file FILE: {remedy}")
    for name in ("test_file", "max_eval_samples", "output_dir"):
        if settings.get(name):
            why = "each fold is evaluated on its part of the training rows"
            raise UserError(f"--{name} does not fit ({why}): leave it out")
    if runs.settings:
        runs.parse(["--validation_file=part"])
    for name in ("model_name_or_path", "teacher"):
        model = settings.get(name)
        if model and _was_trained_on(str(model), file):
            why = "was trained on the labels of these rows, which it would predict again"
            remedy = "take the model that it was fine-tuned from"
            raise UserError(f"--{name} {model} {why}: {remedy}")


def _was_trained_on(model: str, file: str) -> bool:
    run = training_run(model)
    trained = run["settings"].get("train_file")
    if not trained or not run["data"].get("labels"):
        return False
    return Path(run["launch"].get("folder", ""), trained).resolve() == Path(file).resolve()


def _text_columns(
    table: Table, settings: dict[str, Any], labels: tuple[str, ...]
) -> tuple[str, str | None]:
    pair = settings.get("text_pair")
    text = table.text_column(settings.get("text_column"), [*labels, pair])
    return text, table.pair_column(pair, text)


def _run_fold(runs: RecipeRuns, fold: int, table: Table, rows: Any) -> None:
    import numpy as np

    parts = {"train": np.setdiff1d(np.arange(len(table)), rows), "validation": rows}
    files = {}
    for name, numbers in parts.items():
        files[f"{name}_file"] = runs.folder / f"fold-{fold}.{name}.parquet"
        write_part(files[f"{name}_file"], table, numbers)
    runs.run(f"fold-{fold}", files)
