"""Starts recipes from a process that has imported what they import, which is most of the time that a start takes.

    python tests/fork_server.py

Each line of standard input is a JSON object {"argv": [...], "env": {...}, "out": PATH, "err": PATH}. It is answered by
the process id of the new process, a line of standard output, and by its exit code when it has ended, another line.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def serve() -> dict[str, Any]:
    """Returns, in each new process, what is asked of it."""
    for line in sys.stdin:
        request = json.loads(line)
        if not (child := os.fork()):
            return dict(request)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """The process that `python ARGV` would have been."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    for number, path in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent.resolve())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    for module in ("datasets", "sklearn.metrics", "sklearn.model_selection", "toolkit.report.html", "recipes.cls"):
        importlib.import_module(module)
    become(serve())
    del sys.modules["recipes.cls"]
    runpy.run_path(sys.argv[0], run_name="__main__")
