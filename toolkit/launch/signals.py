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


_kept_by: StopSignals | None = None


class StopRequested(Exception):  # noqa: N818
    """A stop signal came while an evaluation ran."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_if_requested(accelerator: Any) -> None:
    """Raises StopRequested, in all processes, where one of them has got a stop signal that is kept; all call this."""
    if _kept_by is None:
        return
    number = _kept_by.requested
    if accelerator.num_processes > 1:
        import torch

        number = int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max().item())
    if number:
        raise StopRequested(number)


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
        global _kept_by
        _kept_by = self
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            self._before = {number: signal.signal(number, self._handle) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        global _kept_by
        _kept_by = None
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
