"""Attempts (`--max_restarts`), and what a process leaves for the launcher that started it.

torchrun, and `accelerate launch` through it, start all processes of a machine again when one has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from toolkit.launch.interrupted import write_exit_code


def attempt() -> int:
    """0 for the first."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def max_restarts() -> int:
    """Of `--max_restarts`."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def launcher_serves_store() -> bool:
    """Whether torch's store is the launcher's, and the same for all attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def stop_with_parent(parent: int | None = None) -> None:
    """SIGTERM for this process when its parent ends; it stays so when another program takes the process over.

    Nothing where `parent` is not its parent. To the kernel it is the thread that forked: that one has to wait.
    """
    parent = parent or os.getppid()
    if sys.platform == "linux" and os.getppid() == parent:
        set_parent_death_signal = 1  # prctl(2), PR_SET_PDEATHSIG
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended meanwhile
            os.kill(os.getpid(), signal.SIGTERM)


def stop_launcher(code: int) -> None:
    """Lets the launcher end, with this exit code where it is ours, instead of starting again what was stopped or would
    fail again: a setting, a file, another version."""
    write_exit_code(code)
    if attempt() < max_restarts() and os.getppid() != 1:
        os.kill(os.getppid(), signal.SIGTERM)
