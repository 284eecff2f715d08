"""Stop signals (SIGTERM, SIGUSR1, Ctrl-C): obeyed when the step is done."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

from toolkit.launch import failure_detector
from toolkit.launch.environment import timeout_seconds
from toolkit.launch.exit_state import exit_state
from toolkit.launch.failure import exit_process

# Launchers pass a terminal's Ctrl-C on to processes that have had it already: a second one within this
# time is the same one.
_REPEAT_SECONDS = 3.0
_REPORT_SECONDS = 2.5
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# A process has one handler of a signal, and an evaluation within the steps stops by what it has got.
current: StopSignals | None = None


class StopRequested(Exception):  # noqa: N818
    """A stop signal came while an evaluation ran."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_requested() -> int:
    """The number of a stop signal that this process has got and not yet obeyed; 0 where there is none."""
    return current.requested if current else 0


class StopSignals:
    """`with StopSignals() as signals: ...`: inside, such a signal only sets `signals.requested`.

    Ctrl-C again, after three seconds, interrupts at once. Where the main thread then stands still for --stop_timeout
    seconds, and for twice as long as any step has taken, it hangs (in a collective, say), and the process ends.
    """

    def __init__(self, speaks: bool) -> None:
        self._number, self._speaks, self._longest = 0, speaks, 0.0
        self._since = self._read = time.monotonic()
        self._exited = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> int:
        """The signal's number; 0 as long as none has come. Read once a step, it also measures how long one takes."""
        self._longest, self._read = max(self._longest, time.monotonic() - self._read), time.monotonic()
        return self._number

    def __enter__(self) -> StopSignals:
        global current
        current = self
        self._read = time.monotonic()
        self._exited.clear()
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            self._before = {number: signal.signal(number, self._handle) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        global current
        current = None
        self._exited.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self._number:
            self._number, self._since = number, now
            threading.Thread(target=self._end_where_it_hangs, daemon=True, name="stop").start()
            if number != signal.SIGTERM:
                self._speak()
        elif number == signal.SIGINT and now - self._since > _REPEAT_SECONDS:
            raise KeyboardInterrupt

    def _speak(self) -> None:
        if self._speaks and not exit_state.exit_code:  # os.write: a handler may not wait for a stream's lock
            os.write(
                2, f"\n{signal.Signals(self._number).name}: stopping after this step, with a checkpoint\n".encode()
            )

    def _end_where_it_hangs(self) -> None:
        limit, since = max(float(timeout_seconds("stop_timeout")), 2 * self._longest), time.monotonic()
        seen: list[tuple[str, int | None]] = []
        # of a process that was killed a launcher ends the others, too: the failure detector is first
        if self._number == signal.SIGTERM and not self._exited.wait(_REPORT_SECONDS):
            self._speak()
        while not self._exited.wait(0.5):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = [(entry.filename, entry.lineno) for entry in traceback.extract_stack(frame)]
            saves = any("/toolkit/checkpoint/" in file for file, _ in stack)  # a large file takes its time
            if stack != seen or saves:
                seen, since = stack, time.monotonic()
            elif time.monotonic() - since > limit:
                doing, name = failure_detector.main_thread_position(), signal.Signals(self._number).name
                text = (
                    f"{name} came, and for {limit:.0f} s nothing has moved at {doing}: ended without a new checkpoint"
                )
                exit_process(f"error: {text} (longer: --stop_timeout SECONDS)", 128 + self._number, text, final=True)
