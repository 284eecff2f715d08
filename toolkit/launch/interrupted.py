"""Ctrl-C while libraries are being imported: one line and exit code 130, not a traceback.

`toolkit.launch` imports this module first. While `toolkit.launch` is imported, and from `launch.start` to `launch.run`,
a handler exits on SIGINT: an import may swallow KeyboardInterrupt and leave a half-initialised library behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

INTERRUPTED = 130
# Variables set by our launcher: the file to write the exit code to (then it reports nothing itself), and its pid.
EXIT_CODE_FILE = "TOOLKIT_ENDED_FILE"
LAUNCHER_PID = "TOOLKIT_LAUNCHER_PID"
# set by torch's launchers, Open MPI, Hydra and Slurm
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def report_interrupt() -> None:
    """Ctrl-C reaches every process of a terminal: rank 0 prints the line, the launcher only if no rank did."""
    os.write(2, b"interrupted\n")  # a signal handler must not wait for a stream's lock
    write_exit_code(INTERRUPTED)


def write_exit_code(code: int, line: str = "") -> None:
    """Writes the code for our launcher, if it started this process; the first process that reports a cause counts.
    `line` is for the launcher to report, unless it knows more of a process that has ended."""
    if path := os.environ.get(EXIT_CODE_FILE):
        with contextlib.suppress(OSError), Path(path).open("x", encoding="utf-8") as file:
            file.write(f"{code} {line}")


def exit_on_sigint() -> None:
    """Exits on SIGINT until `restore_sigint`. No effect at an interactive prompt, or if SIGINT is ignored."""
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    if not interactive and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _exit)


def restore_sigint() -> None:
    """Makes SIGINT raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> None:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers forward a SIGINT that this process already got
    if next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0") == "0":
        report_interrupt()
    os._exit(INTERRUPTED)


exit_on_sigint()
