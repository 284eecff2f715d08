"""The command `toolkit compare`."""

from __future__ import annotations

import argparse

from toolkit.utils.features import Command, Feature


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        help="also write a page with the curves of all runs",
    )


FEATURE = Feature(
    Command(
        name="compare",
        help="compare the metrics of runs",
        run="toolkit.features.compare.command:run",
        add_arguments=_add_arguments,
        description="Compares runs on the rows they predicted: metrics, and differences from the "
        "best run, with confidence intervals.",
    )
)
