"""The commands `toolkit folds` and `toolkit correct-labels`."""

from __future__ import annotations

import argparse

from toolkit.data.options import add_reading_options
from toolkit.utils.features import Command, Feature


def _add_folds(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE.py")
    add("--train_file", metavar="FILE", help="the labelled rows")
    add("--folds", type=int, default=5, metavar="N", help="how many models are trained [5]")
    add("--output_dir", metavar="FOLDER", help="where to write [runs/folds-RECIPE]")
    for name in ("text_column", "text_pair", "label_column"):
        add(f"--{name}", metavar="NAME", help="as for the recipe")
    add_reading_options(parser)


def _add_correct(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", help="the labelled rows that `toolkit folds` has read")
    add(
        "corrections",
        help="a file that the page of the folds has saved, or label_errors.jsonl",
    )
    add("output", help="the file to write: CSV, TSV, JSON, JSONL or Parquet")
    add_reading_options(parser)


FEATURE = Feature(
    Command(
        "folds",
        "find wrong labels by cross-validation",
        "toolkit.features.folds.command:run",
        _add_folds,
        usage="toolkit folds RECIPE.py [SETTINGS.yaml] --train_file FILE [--folds N] "
        "[--name value ...]",
        description="Trains N models, each without a part of the rows, which it then predicts. All "
        "other options are passed to the recipe. The same command continues after an interruption.",
        relaunches=False,
        passes_rest=True,
    ),
    Command(
        "correct-labels",
        "write a file with corrected labels",
        "toolkit.features.folds.correct:run",
        _add_correct,
        description="Applies corrections of `toolkit folds` to the rows it has read.",
        relaunches=False,
    ),
)
