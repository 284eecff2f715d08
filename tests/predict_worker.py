"""`toolkit predict` with windows of 16 rows, in a group of processes (tests/jobs_worker.py)."""

from __future__ import annotations

import sys

from toolkit.cli import build_parser
from toolkit.data import parse, read
from toolkit.evaluation import predict_file


def main() -> None:
    parse.BATCH_ROWS = read.BATCH_ROWS = 8
    predict_file.WINDOW_ROWS = 16
    predict_file.predict_file(build_parser().parse_args(["predict", *sys.argv[1:]]))
