"""Options of commands that read a file without a recipe's settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config import TextSettings
from toolkit.data import text_files
from toolkit.data.read import files_of, format_of

REMEMBERED = ("encoding", "delimiter", "quoting", "column_names")
"""How a file of this form is read: saved with the model that it trains."""


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


def reading_settings(options: argparse.Namespace, **defaults: Any) -> TextSettings:
    """How a file is read; `defaults` replace those of `TextSettings`."""
    names = (*REMEMBERED, "encoding_errors")
    values = {name: getattr(options, name) for name in names}
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


def fitting_settings(
    file: str, remembered: Mapping[str, Any], text_column: str
) -> dict[str, str]:
    """Those of the remembered settings that fit a file: of the same format; an encoding if the file
    is not in UTF-8; a delimiter that its first line has; names of columns if that line is no header
    with `text_column`."""
    path = files_of(file)[0]
    suffixes = Path(str(remembered.get("train_file", "")).lower()).suffixes
    if not path.is_file() or format_of(path) not in suffixes:
        return {}
    fitting = {name: remembered[name] for name in REMEMBERED if name in remembered}
    if "encoding" in fitting and not text_files.undecodable_lines(path, "utf-8")[1]:
        del fitting["encoding"]
    settings = TextSettings(**fitting)
    header = "".join(text_files.first_lines(path, settings, 1))
    delimiter = text_files.delimiter_of(path, settings)
    is_text = False
    if delimiter not in header:
        fitting.pop("delimiter", None)
        is_text = format_of(path) == ".txt"
        delimiter = ","
    cells = {cell.strip(' "') for cell in header.split(delimiter or None)}
    if is_text or cells & set(text_column.split(",")):
        fitting.pop("column_names", None)
    return fitting
