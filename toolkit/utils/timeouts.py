"""A timeout for calls that have none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_with_timeout(seconds: float, work: Callable[[], Result]) -> Result:
    """Returns or raises what `work` does; TimeoutError after `seconds`, with its thread left running."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="call_with_timeout")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    return results[0]
