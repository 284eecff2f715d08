"""What a process does as it ends: what it closes, how it reports a failure, its exit code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.utils.timeouts import call_with_timeout

# A tracker's server may not answer, and an end must not hang on it.
_CLOSE_SECONDS = 10.0
_closing = threading.Lock()


@dataclass
class ExitState:
    """Set by a recipe on its way, through the functions of `toolkit.launch`."""

    close: Callable[[], object] | None = None
    """Of what is open: an end by `os._exit` closes nothing by itself."""
    explain: Callable[[Exception], str | None] | None = None
    """The message for an exception; None for a traceback."""
    exit_code: int = 0
    """Where what was to be done is not finished."""
    again: bool = False
    """`main` is called once more."""


# The process's one: it may end from its main thread, from one of the failure detector or from a signal handler, and
# nothing can be handed down to all of them.
exit_state = ExitState()


def close_on_failure(close: Callable[[], object] | None = None) -> None:
    """From now on a failure, a peer's death and a second stop signal call `close` before the process ends, and wait for
    it ten seconds at most. Without it nothing is open any more."""
    exit_state.close = close


def close_resources() -> None:
    """Two threads may be about to end the process: the second one waits for the first."""
    with _closing:
        close, exit_state.close = exit_state.close, None
        if close is not None:
            with contextlib.suppress(Exception):  # the failure has been reported
                call_with_timeout(_CLOSE_SECONDS, close)
