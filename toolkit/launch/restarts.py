"""Restarts (`--max_restarts`), and how a process stops its launcher or stops with it.

When one process has failed, torchrun (and `accelerate launch`, which uses it) restarts all processes of the node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from toolkit.launch.interrupted import write_exit_code


def attempt() -> int:
    """The number of restarts so far."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def max_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def launcher_serves_store() -> bool:
    """Whether the launcher serves torch's store, the same for all attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
    write_exit_code(code)
    if attempt() < max_restarts() and os.getppid() != 1:
        os.kill(os.getppid(), signal.SIGTERM)
