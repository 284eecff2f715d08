"""`toolkit compare`: which of several runs is better."""

from __future__ import annotations

import argparse

from toolkit.utils.features import Command, Feature


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--output", metavar="FILE.html", help="also write one page with the curves over each other")
    parser.add_argument("--json", action="store_true", help="print JSON")


FEATURE = Feature(
    Command(
        "compare",
        "which of several runs is better, and what each took",
        "toolkit.features.compare.command:run",
        _add_arguments,
        "Compares runs on the rows they predicted: metrics with intervals, paired tests, speed, memory.",
    )
)
