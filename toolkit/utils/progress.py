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
        self.what, self.total, self.unit = what, total, unit
        self.started = time.monotonic()
        self.due = self.started + FIRST_SECONDS
        self.terminal, self.shown = sys.stderr.isatty(), False

    def update(self, done: int, part: float | None = None) -> None:
        """`part`: the share of the work that is done, if it is not that of the rows."""
        now = time.monotonic()
        if part is None:
            part = done / max(1, self.total)
        if now < self.due or not part:
            return
        self.due = now + (SCREEN_SECONDS if self.terminal else LINE_SECONDS)
        self.shown = True
        seconds = now - self.started
        remaining = tqdm.format_interval(seconds * (1 - part) / part)
        rate = f"{done / seconds:.0f} {self.unit}/s"
        line = f"{self.what}: {done} of {self.total} {self.unit}, {rate}, {remaining} left"
        before, after = ("\r", "\x1b[K") if self.terminal else ("", "\n")
        print(before + line + after, end="", file=sys.stderr, flush=True)

    def update_part(self, before: int, size: int, _: int, part: float) -> None:
        """`update` for a part of `size` rows, after `before` others."""
        rows = before + part * size
        self.update(round(rows), rows / self.total)

    def close(self) -> None:
        """Removes the line from a terminal."""
        if self.shown and self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
