"""Options of commands that read a file without a recipe's settings."""

from __future__ import annotations

import argparse
from typing import Any

from toolkit.config import TextSettings

_NAMES = ("encoding", "delimiter", "quoting", "column_names")


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--encoding", metavar="NAME", help="encoding of CSV, TSV and JSON files [utf-8]")
    add(
        "--delimiter",
        metavar="CHARACTER",
        help="delimiter of cells; default: by the suffix",
    )
    quoting = "none: a double quote is part of the text [as in training, or csv]"
    add("--quoting", choices=("csv", "none"), help=quoting)
    add("--column_names", metavar="NAMES", help="of a file without a header: label,text")


def reading_settings(options: argparse.Namespace, **defaults: Any) -> TextSettings:
    """How a file is read; `defaults` replace those of `TextSettings`."""
    given = {name: getattr(options, name) for name in _NAMES if getattr(options, name)}
    return TextSettings(**{**defaults, **given})
