"""How far a rank is, from its heartbeats: whether it computes, waits, has ended, or is stopped."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

AT_END = "the end of the script"  # a position: it waits for the other ranks there
# A rank without a heartbeat for this long does not answer.
_ANSWER_SECONDS = 6.0


@dataclass
class Progress:
    """A rank's progress, from its heartbeats."""

    polls: int = 0
    """How often it has polled its connections."""
    collectives: int = 0
    waits: bool = False  # in the last one
    position: str = "its start"
    alive: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)  # to another collective
    changed: float = field(default_factory=time.monotonic)  # its position

    def update(self, polls: int, collectives: int, waits: bool, position: str) -> None:
        if polls != self.polls:
            self.alive = time.monotonic()
        if collectives != self.collectives:
            self.moved = time.monotonic()
        if position != self.position:
            self.changed = time.monotonic()
        self.polls, self.collectives, self.waits, self.position = polls, collectives, waits, position

    def describe(self, pid: int, is_done: bool) -> str:
        """`it is at read.py:70 read_file < ...`."""
        if is_done or self.position == AT_END:
            return "it has ended, by `sys.exit()` or after fewer steps"
        if time.monotonic() - self.alive > _ANSWER_SECONDS:
            return f"it does not answer: process {pid} there is stopped or stuck, and may need a `kill -9`"
        state = f"waits in collective {self.collectives}," if self.waits else "is"
        return f"it {state} at {self.position}"
