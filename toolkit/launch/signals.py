"""Stop signals (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C): the run stops after the current step."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

from toolkit.launch import collectives, failure_detector
from toolkit.launch.environment import timeout_seconds
from toolkit.launch.exit_state import exit_state
from toolkit.launch.failure import exit_process

# Launchers forward a terminal's Ctrl-C to processes that already got it: a second SIGINT within this time is the same.
_REPEAT_SECONDS = 3.0
# After SIGTERM wait this long before printing: a launcher also sends it when a peer died, which is reported first.
_REPORT_SECONDS = 2.5
_CHECKPOINTS = "/toolkit/training/checkpoints.py"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

# A global: a process has one handler per signal, and an evaluation during training stops on the same signal.
current: StopSignals | None = None
# a forked child's signals are not this process's
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1) if current else None)


class StopRequested(Exception):  # noqa: N818
    """A stop signal arrived during an evaluation."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_requested() -> int:
    """The number of a stop signal that this process has received and not yet handled; 0 for none."""
    return current.requested if current else 0


class StopSignals:
    """`with StopSignals() as signals: ...`: inside, a stop signal only sets `signals.requested`.

    A second Ctrl-C, three seconds later or more, raises KeyboardInterrupt. If the main thread then does not move for
    --stop_timeout seconds and for twice the longest step, it hangs (in a collective, say), and the process exits. A
    thread does that: Python calls a handler only when the main thread has returned from C code, but writes the signal's
    number to a socket at once.
    """

    def __init__(self, prints: bool) -> None:
        self._number, self._prints, self._longest = 0, prints, 0.0
        self._since = self._read = time.monotonic()
        self._exited = threading.Event()
        self._before: dict[int, Any] = {}
        self._socket: socket.socket | None = None

    @property
    def requested(self) -> int:
        """The signal's number; 0 for none. Read it once per step: the time between reads is the length of a step."""
        self._longest, self._read = max(self._longest, time.monotonic() - self._read), time.monotonic()
        return self._number

    def __enter__(self) -> StopSignals:
        global current
        current = self
        self._read = time.monotonic()
        self._exited.clear()
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            numbers = list(_STOP_SIGNALS)
            if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
                numbers.remove(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
            reader, self._socket = socket.socketpair()
            self._socket.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._socket.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), daemon=True, name="stop").start()
        return self

    def __exit__(self, *_: object) -> None:
        global current
        current = None
        self._exited.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._socket is not None:
            signal.set_wakeup_fd(self._wakeup_before)  # an event loop's, in a notebook
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread
            self._socket.close()

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self._number:
            self._number, self._since = number, now
            if number != signal.SIGTERM:
                self._print(number)
        elif number == signal.SIGINT and now - self._since > _REPEAT_SECONDS:
            raise KeyboardInterrupt

    def _print(self, number: int) -> None:
        detector = failure_detector.current
        is_failing = detector is not None and detector.failure is not None  # launchers then send SIGTERM
        if self._prints and not exit_state.exit_code and not is_failing:
            # os.write: a signal handler must not wait for a stream's lock
            line = f"\n{signal.Signals(number).name}: stopping after this step, with a checkpoint\n"
            with contextlib.suppress(OSError):  # the terminal is closed
                os.write(2, line.encode())

    def _watch(self, reader: socket.socket) -> None:
        with reader:
            while data := reader.recv(1):  # empty at the end of the run
                if data[0] in self._before:  # other handlers' signals are written, too
                    self._exit_if_stuck(data[0])

    def _exit_if_stuck(self, number: int) -> None:
        limit, since = max(float(timeout_seconds("stop_timeout")), 2 * self._longest), time.monotonic()
        seen: tuple[list[tuple[str, int | None]], str] = [], ""
        if number == signal.SIGTERM and not self._exited.wait(_REPORT_SECONDS):
            self._print(number)
        while not self._exited.wait(0.5):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = [(entry.filename, entry.lineno) for entry in traceback.extract_stack(frame)]
            # a large file takes long, also if another rank or DeepSpeed writes it
            is_saving = any("/toolkit/checkpoint/" in file or file.endswith(_CHECKPOINTS) for file, _ in stack)
            detector = failure_detector.current
            moving = stack, detector.position_of_main() if detector else ""  # which may compute metrics for all ranks
            if moving != seen or is_saving:
                seen, since = moving, time.monotonic()
            elif time.monotonic() - since > limit:
                name, position = signal.Signals(number).name, collectives.main_thread_position()
                text = f"{name}: stuck at {position} for {limit:.0f} s: exiting without a new checkpoint"
                message = f"error: {text} (--stop_timeout SECONDS waits longer)"
                exit_process(message, 128 + number, text, permanent=True)
