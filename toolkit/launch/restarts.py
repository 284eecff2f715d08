"""What a process tells the launcher that started it, and knows of earlier attempts (`--max_restarts`).

torchrun, and `accelerate launch` through it, start all processes of a machine again when one has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from toolkit.launch.environment import MARKER
from toolkit.launch.interrupted import ENDED_FILE


def attempt() -> int:
    """0 for the first."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def most_restarts() -> int:
    """What --max_restarts says."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def started() -> str | None:
    """When our own launcher was, before all attempts: `20260701-120000`."""
    return dict(json.loads(os.environ.get(MARKER) or "{}")).get("started")


def end_with_launcher() -> None:
    """Where our launcher is killed, this process is told to stop (SIGTERM): it would train on with nobody to end it."""
    if ENDED_FILE in os.environ:
        stop_with_parent()


def stop_with_parent() -> None:
    """SIGTERM for this process when its parent ends; it stays so when another program takes the process over."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # prctl(2), PR_SET_PDEATHSIG
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def give_up(code: int) -> None:
    """Lets the launcher end, with this exit code where it is ours, instead of starting again what was stopped or would
    fail again: a setting, a file, another version."""
    if path := os.environ.get(ENDED_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(str(code), encoding="ascii")
    if attempt() < most_restarts() and os.getppid() != 1:
        os.kill(os.getppid(), signal.SIGTERM)
