"""A process of a run, as the others know it, and why a run ends."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Member:
    """A process of the run."""

    rank: int
    host: str
    machine: str
    """See `facts.machine`."""
    local_rank: int
    pid: int


@dataclass(frozen=True)
class Cause:
    """Why a run ends."""

    rank: int
    kind: Literal["failed", "interrupted", "gone", "lost", "hangs"]
    """It said so itself; its process ended; its machine does not answer; it does not arrive."""
    message: str
    hopeless: bool = False
    """It would fail again."""


def where() -> str:
    """What the main thread is doing: `prepare.py:70 _prepared < cls.py:31 main`, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its end"
    stack = traceback.extract_stack(frame)[::-1]
    return " < ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in stack[:6])  # noqa: PTH119
