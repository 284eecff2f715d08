"""Launchers that start failed processes again (`--max_restarts`): what those must know of the first attempt.

torchrun, and `accelerate launch` through it, start all processes of a machine again when one has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from toolkit.compat import require

# Names the file by which a run tells our launcher how it ended: in good order, or for a reason that will not go away.
ENDED_FILE = "TOOLKIT_ENDED_FILE"
STOPPED, FINAL = "stopped", "final"
_PREFIX = "toolkit/remembered"


def attempt() -> int:
    """0 for the first."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def most_restarts() -> int:
    """What --max_restarts says."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def tell_launcher(how: str) -> None:
    """Leaves word for our own launcher, where that started this process."""
    path = os.environ.get(ENDED_FILE)
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(how, encoding="ascii")


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


def separate_attempts() -> None:
    """Gives the process group of each attempt names of its own in the launcher's store, which outlives them: a process
    that is early would find where another one listened the last time. (torch relies on a new store for each.)"""
    if not attempt():
        return
    from torch.distributed import PrefixStore

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the attribute is a function
    make_store = require(rendezvous, "_create_c10d_store", "torch")
    prefix = f"toolkit/attempt/{attempt()}"
    rendezvous._create_c10d_store = lambda *given, **named: PrefixStore(prefix, make_store(*given, **named))


def give_up() -> None:
    """Lets our launcher end instead of starting again what will fail again: a setting, a file, another version."""
    if ENDED_FILE in os.environ and attempt() < most_restarts() and os.getppid() != 1:
        tell_launcher(FINAL)
        os.kill(os.getppid(), signal.SIGTERM)


def remember(name: str, value: str) -> None:
    """For the attempts after this one; nothing where the launcher keeps nothing."""
    store = _agents_store()
    if store is not None:
        store.set(f"{_PREFIX}/{name}", value)


def remembered(name: str) -> str | None:
    """What an earlier attempt remembered."""
    store = _agents_store() if attempt() else None
    if store is None or not store.check([f"{_PREFIX}/{name}"]):
        return None
    return str(store.get(f"{_PREFIX}/{name}").decode())


def _agents_store():  # type: ignore[no-untyped-def]
    """The launcher's own store, which outlives its processes; None where it has none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not most_restarts():
        return None
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, None, False, timedelta(seconds=30), wait_for_workers=False)
