"""Options of commands that read a file without a recipe's settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from toolkit.config import TextSettings

REMEMBERED = ("encoding", "delimiter", "quoting", "column_names")
"""How a file of this form is read: saved with the model that it trains."""
READING = (*REMEMBERED, "encoding_errors")


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--encoding", metavar="NAME", help="encoding of CSV, TSV and JSON files [utf-8]")
    errors = "replace: bytes that are not in the encoding become U+FFFD"
    add("--encoding_errors", choices=("strict", "replace"), help=errors)
    add(
        "--delimiter",
        metavar="CHARACTERS",
        help="between cells: ';', tab; none: a text is a line; default: by the suffix",
    )
    quoting = "none: a double quote is part of the text [csv]"
    add("--quoting", choices=("csv", "none"), help=quoting)
    names = "of a file without a header: label,text; '' if it has one"
    add("--column_names", metavar="NAMES", help=names)


def add_self_test_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--self_test",
        choices=("error", "warn", "off"),
        default="error",
        help="if a model answers otherwise than when it was saved [error]",
    )


def reading_settings(options: argparse.Namespace, **defaults: Any) -> TextSettings:
    """How a file is read; `defaults` replace those of `TextSettings`."""
    values = {name: getattr(options, name) for name in READING}
    given = {name: value for name, value in values.items() if value is not None}
    return TextSettings(**{**defaults, **given})


def remembered_settings(data: TextSettings) -> dict[str, str]:
    """What of the settings of a run tells how its training file is read, and its name."""
    values = {name: getattr(data, name) for name in REMEMBERED}
    plain = TextSettings()
    changed = {name: each for name, each in values.items() if each != getattr(plain, name)}
    if changed:
        changed["train_file"] = Path(str(data.train_file)).name
    return changed
