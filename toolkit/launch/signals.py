"""Stop signals (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C): the run stops after the current step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, ClassVar

INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# torchrun forwards a terminal's Ctrl-C to ranks that already got it: in this time it is the same
_REPEAT_SECONDS = 3.0


class StopRequested(Exception):  # noqa: N818
    """A stop signal arrived during an evaluation; its argument is the signal's number."""


def stop_requested() -> int:
    """The number of a stop signal that this process has received and not yet handled; 0: none."""
    signals = StopSignals.current
    return signals.requested if signals else 0


class StopSignals:
    """`with StopSignals(prints=True) as signals: ...`: inside, a stop signal only sets
    `signals.requested`. A second Ctrl-C, three seconds later or more, raises KeyboardInterrupt.
    """

    current: ClassVar[StopSignals | None] = None
    """The one that receives them."""

    def __init__(self, prints: bool) -> None:
        self.requested = 0
        """The signal's number; 0: none."""
        self._prints = prints
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        StopSignals.current = self
        # others cannot set handlers
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP under nohup
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        StopSignals.current = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested:
            if number == signal.SIGINT and now - self._since > _REPEAT_SECONDS:
                raise KeyboardInterrupt
            return
        self.requested, self._since = number, now
        # which launchers send after a failure, too
        if self._prints and number != signal.SIGTERM:
            line = f"\n{signal.Signals(number).name}: stopping after this step, with a checkpoint\n"
            with contextlib.suppress(OSError):  # the terminal is closed
                # a signal handler must not wait for a stream's lock
                os.write(2, line.encode())
