"""The `toolkit` command and the table of its subcommands, which import heavy libraries
themselves."""

from __future__ import annotations

import pkgutil
import sys
from typing import Any

from toolkit import __version__, launch
from toolkit.commands import convert, init, prepare, report, to_bigbird
from toolkit.errors import Parser
from toolkit.utils import collector
from toolkit.utils.features import Command, features
from toolkit.utils.log import PlainOutput


def commands() -> dict[str, Command]:
    """All commands by name: the core's, then the features'."""
    modules = (init, prepare, convert, to_bigbird, report)
    table = {module.COMMAND.name: module.COMMAND for module in modules}
    for feature in features():
        table |= {command.name: command for command in feature.commands}
    return table


def build_parser(table: dict[str, Command] | None = None) -> Parser:
    """The parser of `toolkit` and of each command that adds arguments."""
    description = "Fine-tune encoders: data, prediction, checkpoints, reports."
    parser = Parser(prog="toolkit", description=description, allow_abbrev=False)
    parser.add_argument(
        "--version", action="version", version=f"finetune-toolkit {__version__}"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (table or commands()).values():
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            epilog=command.epilog,
            usage=command.usage,
            allow_abbrev=False,
        )
        if command.add_arguments:
            command.add_arguments(subparser)
    return parser


def main() -> None:
    """Entry point of `toolkit` and `python -m toolkit`."""
    collector.before_imports()
    table = commands()
    command = table.get(sys.argv[1]) if sys.argv[1:] else None
    relaunches = command is None or command.relaunches
    launch.run(lambda: _run(table), relaunches=relaunches)


def _run(table: dict[str, Command]) -> None:
    output: Any = PlainOutput(sys.stdout)
    sys.stdout = output
    words = sys.argv[1:] or ["--help"]
    command = table.get(words[0])
    parser = build_parser(table)
    if command is None:
        parser.parse_args(words)  # --help, --version, or an error
    elif command.add_arguments is None:
        _call(command, words[1:])
    elif command.passes_rest:
        _call(command, *parser.parse_known_args(words))
    else:
        _call(command, parser.parse_args(words))


def _call(command: Command, *arguments: Any) -> None:
    run = command.run
    if isinstance(run, str):
        run = pkgutil.resolve_name(run)
    run(*arguments)
