"""The argument parser of a recipe: its settings in groups, with their choices and defaults."""

from __future__ import annotations

import argparse
import functools
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from toolkit.utils.features import features

SWITCHES = (bool, bool | None)
# the settings in `--help`; `--help_all` lists all
_FIRST = {
    "model_name_or_path", "train_file", "validation_file", "test_file", "dataset_name", "text_column", "label_column",
    "max_length", "output_dir", "num_train_epochs", "global_batch_size", "per_device_batch_size",
    "learning_rate", "mixed_precision", "checkpoint_every",
}  # fmt: skip
_LAUNCH = """To choose how it runs: --config_file accelerate_configs/NAME.yaml (with --num_processes, --machines,
--machine_rank, --main_process_ip, --main_process_port, --max_restarts), or --deepspeed_config
under `deepspeed`; timeouts in seconds: --rendezvous_timeout, --ddp_timeout, --peer_timeout,
--stop_timeout; and --failure_detector off."""


def command_line(
    fields: Mapping[type, Mapping[str, Any]], help_all: bool, description: str | None, program: str | None, launch: bool
) -> argparse.ArgumentParser:
    """A parser of `--name value` that returns strings; a boolean may omit its value, as in transformers. `fields`:
    section -> {setting: pydantic's field}. Its help lists the most used settings, or all (`help_all`)."""
    more = "" if help_all else f"--help_all lists all {sum(map(len, fields.values()))} settings.\n\n"
    width = min(shutil.get_terminal_size().columns, 120)
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [SETTINGS.yaml] [--name value ...]",
        description=description,
        epilog=more + (_LAUNCH if launch else ""),
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=width),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    first = {*_FIRST, *(name for feature in features() for name in feature.first_settings)}
    for section, section_fields in fields.items():
        group = parser.add_argument_group((section.__doc__ or "").strip().rstrip("."))
        for name, field in section_fields.items():
            listed = help_all or name in first or not section.__module__.startswith("toolkit.")
            switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation in SWITCHES else {}
            group.add_argument(
                f"--{name}",
                metavar=metavar(field.annotation),
                help=_help(field) if listed else argparse.SUPPRESS,
                **switch,
            )
    return parser


def join_negative_numbers(arguments: Sequence[str]) -> list[str]:
    """`--x -1e-5` -> `--x=-1e-5`: argparse reads a negative number with an exponent as an option."""
    words: list[str] = []
    for word in arguments:
        if re.match(r"-\.?\d", word) and words and re.fullmatch(r"--\w+", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _help(field: Any) -> str:
    default = "" if field.default is None else f" [{str(field.default).lower()}]"
    return f"{field.description or ''}{default}".replace("%", "%%")


def metavar(annotation: Any) -> str:
    """The metavar: `a|b` for choices, else the kind of value."""
    if hasattr(annotation, "__metadata__"):
        return metavar(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if kinds := [metavar(part) for part in get_args(annotation) if part is not type(None)]:
        choices_first = "|".join(sorted(kinds, key=str.isupper))
        return choices_first.replace("TEXT", "PATH") if len(kinds) > 1 else choices_first
    return {bool: "true|false", int: "NUMBER", float: "NUMBER"}.get(annotation, "TEXT")
