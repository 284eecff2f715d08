"""Stop signals (SIGTERM, SIGUSR1, Ctrl-C): kept until the step is done."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

# Launchers pass a terminal's Ctrl-C on to processes that have had it already: a second one within this
# time is the same one.
SAME_SECONDS = 3.0
_STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)  # Windows has no SIGUSR1


class StopSignals:
    """`with StopSignals() as signals: ...`: inside, such a signal only sets `signals.requested`.

    Ctrl-C again, after three seconds, interrupts at once.
    """

    def __init__(self, speaks: bool) -> None:
        self.requested = 0
        """The signal's number; 0 as long as none has come."""
        self._speaks = speaks
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            self._before = {number: signal.signal(number, self._handle) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = number, now
            if self._speaks:  # os.write: a handler may not wait for a stream's lock
                line = f"\n{signal.Signals(number).name}: stopping after this step, with a checkpoint\n"
                os.write(2, line.encode())
        elif number == signal.SIGINT and now - self._since > SAME_SECONDS:
            raise KeyboardInterrupt
