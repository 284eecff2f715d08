"""The command `toolkit compare`."""

from __future__ import annotations

import argparse

from toolkit.utils.features import Command, Feature


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--output", metavar="FILE.html", help="also write a page with the curves of all runs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


FEATURE = Feature(Command(
    "compare", "compare the metrics, speed and memory of runs", "toolkit.features.compare.command:run",
    _add_arguments,
    "Compares runs on the rows they predicted: metrics with confidence intervals, paired tests, speed, memory.",
))  # fmt: skip
