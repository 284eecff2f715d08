"""How this process exits: what it closes first, how it reports a failure, its exit code, its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from toolkit.launch.environment import attempt, max_restarts
from toolkit.launch.interrupted import LAUNCHER_PID, write_exit_code
from toolkit.utils.timeouts import call_with_timeout

RESUME_HINT = "; the same command resumes from the newest checkpoint, if there is one (--checkpoint_every)"
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
    rerun: bool = False
    """Call `main` again when it returns."""
    unfinished: str = ""
    """A warning for when `main` returns."""
    free: Callable[[], object] | None = None
    """Frees what a strategy keeps of a model when `main` has returned, before it is called again."""


# A global: the main thread, the failure detector's threads and signal handlers can each exit the process.
exit_state = ExitState()


def close_on_failure(close: Callable[[], object] | None = None) -> None:
    """Registers `close`, to be called (10 s at most) before the process exits on a failure, a peer's death or a second
    stop signal; None unregisters it."""
    exit_state.close = close


def close_resources() -> None:
    """Calls the registered `close` once; a second thread that is about to exit waits for the first."""
    with _closing:
        close, exit_state.close = exit_state.close, None
        if close is not None:
            with contextlib.suppress(Exception):  # the failure has been reported
                call_with_timeout(_CLOSE_SECONDS, close)


def stop_with_parent(parent: int | None = None) -> None:
    """Makes the kernel send SIGTERM to this process when its parent ends, also after `exec`.

    No effect if `parent` is not its parent. The kernel watches the thread that forked, so that thread must not end.
    """
    parent = parent or os.getppid()
    if sys.platform == "linux" and os.getppid() == parent:
        set_parent_death_signal = 1  # prctl(2), PR_SET_PDEATHSIG
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended meanwhile
            os.kill(os.getpid(), signal.SIGTERM)


def stop_launcher(code: int) -> None:
    """Stops the launcher (ours exits with `code`) instead of a restart: the run was stopped, or would fail again."""
    parent = os.getppid()
    if attempt() < max_restarts() and _is_launcher(parent):
        write_exit_code(code)
        os.kill(parent, signal.SIGTERM)


def _is_launcher(pid: int) -> bool:
    """False for a process that adopts the ranks of a killed launcher: process 1 (in a container that may be our
    launcher), `systemd --user`, slurmstepd."""
    if LAUNCHER_PID in os.environ:
        return os.environ[LAUNCHER_PID] == str(pid)
    with contextlib.suppress(psutil.Error):
        return pid != 1 and "python" in "".join(psutil.Process(pid).cmdline()[:1])
    return False
