"""`toolkit predict` with windows of 16 rows, in a group of processes (tests/jobs_worker.py), or as a script, which
prints the name of each part that it writes, and sends itself a signal after the part KILLED_AT."""

import os
import signal
import sys
from typing import Any

from toolkit import launch
from toolkit.cli import build_parser
from toolkit.data import text_files
from toolkit.features.predict import command as predict_file
from toolkit.features.predict.parts import Parts


def main() -> None:
    text_files.BLOCK_ROWS = 2  # of which four are a batch
    predict_file.WINDOW_ROWS = 16
    predict_file.predict_file(build_parser().parse_args(["predict", *sys.argv[1:]]))


class _Killed(Parts):
    def write(self, name: str, *columns: Any) -> None:
        super().write(name, *columns)
        print(name, flush=True)
        if os.environ.get("KILLED_AT") == name:
            os.kill(os.getpid(), int(os.environ.get("KILLED_BY", signal.SIGKILL)))


if __name__ == "__main__":
    predict_file.Parts = _Killed
    launch.run(main)
