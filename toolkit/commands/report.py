"""`toolkit report RUN`: rewrites a run's report.html."""

from __future__ import annotations

import argparse

from toolkit.utils.features import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run's folder")


def run(options: argparse.Namespace) -> None:
    from toolkit.report.html import write_report_of_folder

    print(write_report_of_folder(options.run))


COMMAND = Command("report", "rewrite a run's report.html", run, add_arguments)
