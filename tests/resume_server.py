"""Runs recipes/cls.py again and again in one process, since importing is what takes long.

    python tests/resume_server.py

Each line of standard input is a JSON object {"arguments": [...], "largest_file": bytes or null}; each answer,
a line of standard output, {"error": what a UserError said or null, "err": standard error}.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import resource
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes import cls
from toolkit.errors import UserError


@contextlib.contextmanager
def largest_file(size: int | None) -> Iterator[None]:
    """As on a full disk, writing beyond it fails (EFBIG: Python ignores the signal)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    sys.argv = ["recipes/cls.py", *request["arguments"]]
    err, error = io.StringIO(), None
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err), largest_file(request.get("largest_file")):
        try:
            cls.main()
        except UserError as fault:
            error = str(fault)
        except Exception:
            error = traceback.format_exc()
    gc.collect()  # lets go of the run's lock
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    return {"error": error, "err": err.getvalue()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
