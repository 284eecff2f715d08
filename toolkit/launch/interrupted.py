"""Ctrl-C while libraries are still being imported: one line and exit code 130, not a traceback.

`toolkit.launch` imports this first. While it is imported, and from `launch.start` to `launch.run`, a signal handler
answers: a KeyboardInterrupt within an import may be swallowed, and leave half of a library behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

INTERRUPTED = 130
# Names the file in which a run leaves its exit code for our own launcher, where it is not to be started again.
EXIT_CODE_FILE = "TOOLKIT_ENDED_FILE"
# The process id of our own launcher.
LAUNCHER_PID = "TOOLKIT_LAUNCHER_PID"
# as torch's launchers, Open MPI, Hydra and Slurm name it
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def report_interrupt() -> None:
    """Ctrl-C reaches every process of a terminal: the first rank reports it, and the launcher only where none did."""
    os.write(2, b"interrupted\n")  # a handler may not wait for a stream's lock
    write_exit_code(INTERRUPTED)


def write_exit_code(code: int) -> None:
    """For our own launcher, where one started this process."""
    if path := os.environ.get(EXIT_CODE_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(str(code), encoding="ascii")


def exit_on_sigint() -> None:
    """Until `restore_sigint`. Not where somebody types at a prompt, or a shell has left the signal ignored."""
    typing = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    if not typing and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _leave)


def restore_sigint() -> None:
    """From now on it is a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers pass on what their processes have had already
    if next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0":
        report_interrupt()
    os._exit(INTERRUPTED)


exit_on_sigint()
