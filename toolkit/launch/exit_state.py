"""How this process exits: what it closes first, how it reports a failure, its exit code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.utils.timeouts import call_with_timeout

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
