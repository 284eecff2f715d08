"""What this process closes before it exits, and what its launcher does to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.utils.timeouts import call_with_timeout

if TYPE_CHECKING:
    from toolkit.launch.heartbeat import Board

ERROR_FILE = "TOOLKIT_ERROR_FILE"
"""Set by our launcher: the file in which a process leaves its failure for it to print."""
RESUME_HINT = "; the same command resumes from the newest checkpoint (--checkpoint_every)"
_CLOSE_SECONDS = 10.0  # a tracker's server may not answer
_closing = threading.Lock()


@dataclass
class ExitState:
    """Set through the functions of `toolkit.launch`."""

    close: Callable[[], object] | None = None
    """Closes trackers before `os._exit`, which closes nothing."""
    explain: Callable[[Exception], str | None] | None = None
    """Returns the message for an exception; None for a traceback."""
    exit_code: int = 0
    unfinished: str = ""
    """A warning for when `main` returns."""
    board: Board | None = None
    """Where this process reports its failure to other machines, under a launcher that does not."""


# A global: the main thread, the heartbeat's thread and signal handlers can each exit the process.
exit_state = ExitState()


def close_on_failure(close: Callable[[], object] | None = None) -> None:
    """Registers `close`, to be called (10 s at most) before the process exits on a failure;
    None unregisters it."""
    exit_state.close = close


def close_resources() -> None:
    """Calls the registered `close` once; a second thread that exits waits for the first."""
    with _closing:
        close, exit_state.close = exit_state.close, None
        if close is not None:
            with contextlib.suppress(Exception):  # the failure has been reported
                call_with_timeout(_CLOSE_SECONDS, close)


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """Makes Linux send a signal to this process when its parent ends, also after `exec`.

    The kernel watches the thread that forked, so that thread must not end.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        set_parent_death_signal = 1  # prctl(2), PR_SET_PDEATHSIG
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    if os.getppid() != parent:  # it has ended meanwhile
        os.kill(os.getpid(), number)
