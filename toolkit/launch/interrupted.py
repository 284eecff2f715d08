"""Ctrl-C while libraries are still being imported: one line and exit code 130, not a traceback.

`toolkit.launch` imports this first; from `launch.run` on, `run` answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

INTERRUPTED = 130
# Names the file in which a run leaves its exit code for our own launcher, where it is not to be started again.
ENDED_FILE = "TOOLKIT_ENDED_FILE"
# as torch's launchers, Open MPI, Hydra and Slurm name it
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_before = sys.excepthook


def say_interrupted() -> None:
    """Ctrl-C reaches every process of a terminal: the first rank says so, and the launcher only where none did."""
    print("interrupted", file=sys.stderr, flush=True)
    if path := os.environ.get(ENDED_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(str(INTERRUPTED), encoding="ascii")


def _leave(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not issubclass(kind, KeyboardInterrupt) or hasattr(sys, "ps1"):  # ps1: somebody types at Python's prompt
        return _before(kind, error, trace)
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers pass on what their processes have had already
    if next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0":
        say_interrupted()
    os._exit(INTERRUPTED)


sys.excepthook = _leave
