"""What a bad end closes first: it leaves by `os._exit`, which closes nothing by itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

# A tracker's server may not answer, and an end must not hang on it.
_CLOSE_SECONDS = 10.0
_closing = threading.Lock()
_close: Callable[[], object] | None = None


def close_at_bad_end(close: Callable[[], object] | None = None) -> None:
    """From now on a failure, a peer's death and a second stop signal call `close` before the process ends, and wait for
    it ten seconds at most. Without it nothing is open any more."""
    global _close
    _close = close


def is_open() -> bool:
    """Whether there is anything to close."""
    return _close is not None


def close_what_is_open() -> None:
    """In a thread, which is left behind where it hangs. Two threads may be about to end the process: the second one
    waits for the first."""
    global _close
    with _closing:
        close, _close = _close, None
        if close is not None:
            thread = threading.Thread(target=_ignoring_errors, args=(close,), daemon=True, name="close")
            thread.start()
            thread.join(_CLOSE_SECONDS)


def _ignoring_errors(close: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # the failure has been reported
        close()
