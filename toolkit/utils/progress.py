"""The progress of a job that takes longer than five seconds, on stderr."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

FIRST_SECONDS, LINE_SECONDS, SCREEN_SECONDS = 5.0, 15.0, 0.5


class Progress:
    """`validation: 1200 of 5000 rows, 150 rows/s, 00:25 left`, rewritten in a terminal, every 15
    seconds in a file."""

    def __init__(self, what: str, total: int, unit: str = "rows") -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.started = time.monotonic()
        self.due = self.started + FIRST_SECONDS
        self.in_terminal = sys.stderr.isatty()
        self.is_shown = False

    def update(self, done: int, part: float | None = None) -> None:
        """`part`: the share of the work that is done, if it is not that of the rows."""
        now = time.monotonic()
        if now < self.due or not done:
            return
        seconds = now - self.started
        remaining = tqdm.format_interval(seconds / (part or done / self.total) - seconds)
        rate = f"{done / seconds:.0f} {self.unit}/s"
        line = f"{self.what}: {done} of {self.total} {self.unit}, {rate}, {remaining} left"
        if self.in_terminal:
            self.due = now + SCREEN_SECONDS
            self.is_shown = True
            self._rewrite(line)
        else:
            self.due = now + LINE_SECONDS
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the line from a terminal."""
        if self.is_shown:
            self._rewrite("")

    def _rewrite(self, line: str) -> None:
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
