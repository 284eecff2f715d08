"""`toolkit sweep`."""

from __future__ import annotations

import argparse

from toolkit.utils.features import Command, Feature


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    search = (
        "learning_rate=1e-5:1e-4:log (a range) or seed=1,2,3 (a list); may be repeated; "
        "lists only: a grid"
    )
    add("recipe", metavar="RECIPE.py")
    add("--search", action="append", default=[], metavar="NAME=VALUES", help=search)
    add("--trials", type=int, metavar="N", help="total runs of the search [20]")
    add("--seeds", type=int, metavar="N", help="run the best settings with N seeds")
    add(
        "--output_dir",
        metavar="FOLDER",
        help="folder of the sweep [runs/sweep-RECIPE], with a folder for each run",
    )


FEATURE = Feature(Command(
    "sweep", "search for settings, or run several seeds, and compare",
    "toolkit.features.sweep.command:run", _add_arguments,
    usage="toolkit sweep RECIPE.py [SETTINGS.yaml] [--search NAME=LOW:HIGH[:log] ...] "
    "[--name value ...]",
    description="Runs a recipe many times. All other options are passed to the recipe, "
    "--config_file accelerate_configs/ddp.yaml too. The same command continues a sweep that was "
    "stopped.",
    relaunches=False, passes_rest=True,
))  # fmt: skip
