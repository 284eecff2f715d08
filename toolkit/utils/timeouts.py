"""A timeout for calls that have none."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def call_with_timeout(seconds: float, work: Callable[[], Result]) -> Result:
    """Returns or raises what `work` does; TimeoutError after `seconds`, with its thread left
    running."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # an executor would block the exit
    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer, also while `re` matches a pattern of a
    stranger; in the main thread, to which signals go."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
