"""`toolkit estimate`: arguments and command."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from toolkit.config.parse import begins_with_name, parse, tasks
from toolkit.errors import UserError
from toolkit.utils.features import Command, Feature
from toolkit.utils.files import templates


def _run(arguments: list[str]) -> None:
    """`toolkit estimate bigbird ...`, `recipes/bigbird.py ...` or `MODEL ...` (then recipes/cls.py)."""
    task = "cls"
    if begins_with_name(arguments):
        name = arguments.pop(0)
        if Path(name).stem in tasks() and Path(name).suffix in ("", ".py"):
            task = Path(name).stem
        else:
            arguments = ["--model_name_or_path", name, *arguments]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", type=int, default=2)
    options, arguments = parser.parse_known_args(arguments)
    if options.num_processes < 1:
        raise UserError(f"--num_processes {options.num_processes}: give 1 or more")
    description = (
        "Takes the name of a recipe or a model, and the recipe's settings; prints the memory of each of\n"
        "--num_processes N processes [2] under every strategy. Trains nothing."
    )
    usage = "toolkit estimate [MODEL|cls|bigbird|title]"
    read = partial(parse, tasks()[task], description=description, program=usage, launch_help=False)
    settings = read(arguments)
    if settings.model.model_name_or_path is None:
        settings = read([str(templates() / "recipes" / f"{task}_demo.yaml"), *arguments])
    from toolkit.features.estimate.command import run

    run(settings, options.num_processes)


FEATURE = Feature(Command("estimate", "the memory of a job on each process, by strategy", _run, relaunches=False))
