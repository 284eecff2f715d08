"""The state of this process's run: what any of its threads needs to end it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.utils.timeouts import call_with_timeout

if TYPE_CHECKING:
    from toolkit.launch.heartbeat import Board
    from toolkit.launch.ranks import World
    from toolkit.launch.signals import StopSignals

ERROR_FILE = "TOOLKIT_ERROR_FILE"
"""Set by our launcher: the file in which a process leaves its failure for it to print."""
RESUME_HINT = "; the same command resumes from the newest checkpoint (--checkpoint_every)"
_CLOSE_SECONDS = 10.0  # a tracker's server may not answer


@dataclass
class ExitState:
    """Set through the functions of `toolkit.launch`."""

    close: Callable[[], object] | None = None
    """Closes trackers before `os._exit`, which closes nothing."""
    closing: threading.Lock = field(default_factory=threading.Lock)
    explain: Callable[[Exception], str | None] | None = None
    """Returns the message for an exception; None for a traceback."""
    exit_code: int = 0
    unfinished: str = ""
    """A warning for when `main` returns."""
    world: World | None = None
    """The processes of this run; a second accelerator uses the same."""
    board: Board | None = None
    """Where this process reports its failure to other machines, under a launcher that does not."""
    signals: StopSignals | None = None
    """Receives stop signals while the run trains."""


# A global: the main thread, the heartbeat's thread and signal handlers can each exit the process.
exit_state = ExitState()


def close_on_failure(close: Callable[[], object] | None = None) -> None:
    """Registers `close`, to be called (10 s at most) before the process exits on a failure;
    None unregisters it."""
    exit_state.close = close


def close_resources() -> None:
    """Calls the registered `close` once; a second thread that exits waits for the first."""
    with exit_state.closing:
        close, exit_state.close = exit_state.close, None
        if close is not None:
            with contextlib.suppress(Exception):  # the failure has been reported
                call_with_timeout(_CLOSE_SECONDS, close)
