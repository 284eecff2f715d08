"""The progress of a job that takes longer than five seconds, on stderr."""

from __future__ import annotations

import sys

from tqdm import tqdm

_FIRST_SECONDS, _LOG_SECONDS, _SCREEN_SECONDS = 5.0, 15.0, 0.5


class Progress:
    """tqdm's bar: rewritten in a terminal, a line every 15 seconds in a file."""

    def __init__(self, what: str, total: int, unit: str = "rows") -> None:
        seconds = _SCREEN_SECONDS if sys.stderr.isatty() else _LOG_SECONDS
        self._bar = tqdm(
            desc=what,
            total=total,
            unit=f" {unit}",
            delay=_FIRST_SECONDS,
            mininterval=seconds,
            maxinterval=seconds,
            leave=False,
        )

    def update(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Removes the bar from a terminal."""
        self._bar.close()
