"""A timeout for calls that have none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
