"""`--help` of a recipe: its settings in groups, with their choices and defaults."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

# what most people need; `--help_all` has the rest
_FIRST = {
    "model_name_or_path", "train_file", "validation_file", "test_file", "dataset_name", "text_column", "label_column",
    "title_column", "max_length", "output_dir", "num_train_epochs", "global_batch_size", "per_device_batch_size",
    "learning_rate", "mixed_precision", "checkpoint_every",
}  # fmt: skip
_LAUNCH = (
    "To choose how it runs: --config_file accelerate_configs/NAME.yaml (with --num_processes, --machines, "
    "--machine_rank, --main_process_ip, --main_process_port, --max_restarts), or --deepspeed_config under "
    "`deepspeed`; how long is waited: --rendezvous_timeout, --ddp_timeout (seconds)."
)
_INDENT = 30


def print_help_if_asked(
    arguments: Sequence[str], fields: Mapping[type, Mapping[str, Any]], description: str | None, program: str | None
) -> None:
    """Prints the settings of all sections and leaves, where `--help`, `-h` or `--help_all` is among the arguments."""
    whole = "--help_all" in arguments
    if not whole and not {"--help", "-h"} & set(arguments):
        return
    width = min(shutil.get_terminal_size().columns, 120)
    print(f"usage: {program or Path(sys.argv[0]).name} [SETTINGS.yaml] [--name value ...]\n")
    if description:
        print(f"{description.strip()}\n")
    for section, own in fields.items():
        toolkits = section.__module__.startswith("toolkit.")
        shown = {name: field for name, field in own.items() if whole or name in _FIRST or not toolkits}
        if shown:
            print((section.__doc__ or "").strip().rstrip(".") + ":")
        for name, field in shown.items():
            print(_lines_of(name, field, width))
    if not whole:
        print(f"\n--help_all lists all {sum(map(len, fields.values()))} settings.")
    print("\n" + textwrap.fill(_LAUNCH, width))
    raise SystemExit(0)


def _lines_of(name: str, field: Any, width: int) -> str:
    head = f"  --{name} {_values(field.annotation)}"
    default = "" if field.default is None else f" [{str(field.default).lower()}]"
    text = " ".join(f"{field.description or ''}{default}".split())
    body = textwrap.fill(text, width, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT)
    return head + body[len(head) :] if len(head) < _INDENT - 1 else f"{head}\n{body}"


def _values(annotation: Any) -> str:
    """What may be given: `a|b` of choices, else the kind of value."""
    parts = [part for part in get_args(annotation) or (annotation,) if part is not type(None)]
    if get_origin(annotation) is Literal:
        return "|".join(map(str, parts))
    nested = next((part for part in parts if get_origin(part) is Literal), None)
    if nested is not None:
        return "|".join([_values(nested), *(["PATH"] if str in parts else [])])
    return {bool: "true|false", int: "NUMBER", float: "NUMBER"}.get(parts[0], "TEXT")
