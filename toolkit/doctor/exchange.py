"""Machines that have met tell each other things: a message each way between every two, at the same time."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.doctor.meet import Way
from toolkit.launch.wire import Line, WireError


class Deadline:
    """A moment by which all must be over."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self, most: float = float("inf")) -> float:
        """Seconds, at least 0.1 (so that what is there already can still be read) and at most `most`."""
        return max(0.1, min(most, self._at - time.monotonic()))


class Talk:
    """A line to each machine that was met, either way. The one with the lower number chooses which, and begins."""

    def __init__(self, rank: int, ways: Mapping[int, Way]) -> None:
        self.rank = rank
        self._choices = {
            other: [line for line in (way.out, way.back) if line is not None]
            for other, way in ways.items()
            if way.out is not None or way.back is not None
        }
        self.lines: dict[int, Line] = {other: lines[0] for other, lines in self._choices.items() if self.leads(other)}

    @property
    def others(self) -> list[int]:
        """Machines that can still be talked to."""
        return sorted(self._choices)

    def leads(self, other: int) -> bool:
        return self.rank < other

    def leave(self, other: int) -> None:
        """From now on it is not talked to."""
        self._choices.pop(other, None)
        self.lines.pop(other, None)

    def swap(self, phase: str, message: Mapping[str, Any], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """Machine -> what it says, of those that answer in time; the others are not talked to again."""
        said: dict[int, dict[str, Any]] = {}
        lost: dict[int, str] = {}

        def with_one(other: int) -> None:
            try:
                said[other] = self._with_one(other, {**message, "phase": phase}, deadline)
            except (WireError, OSError, ValueError) as error:
                lost[other] = str(error)

        together([lambda other=other: with_one(other) for other in self.others], deadline)  # type: ignore[misc]
        for other in [other for other in self.others if other not in said]:
            self.leave(other)
        return {other: said[other] for other in sorted(said) if other in self._choices}

    def _with_one(self, other: int, message: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        if self.leads(other):
            self.lines[other].send(message, deadline.left(10.0))
            return self._expect(self.lines[other], message["phase"], deadline)
        line = self.lines.get(other) or self._first_to_speak(other, deadline)
        self.lines[other] = line
        heard = self._expect(line, message["phase"], deadline)
        line.send(message, deadline.left(10.0))
        return heard

    def _first_to_speak(self, other: int, deadline: Deadline) -> Line:
        lines = {line.connection: line for line in self._choices[other]}
        ready, _, _ = select.select(list(lines), [], [], deadline.left())
        if not ready:
            raise WireError("it said nothing in time")
        return lines[ready[0]]

    @staticmethod
    def _expect(line: Line, phase: str, deadline: Deadline) -> dict[str, Any]:
        heard = line.receive(deadline.left())
        if heard.get("phase") != phase:
            raise WireError(f"it speaks of {heard.get('phase')!r}, not of {phase!r}")
        return heard


def together(todo: list[Callable[[], None]], deadline: Deadline) -> None:
    """Runs all at once; what is not done in time goes on unheeded in a thread that ends with the process."""
    threads = [threading.Thread(target=one, daemon=True, name="doctor") for one in todo]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.left())


def rounds(count: int, rank: int) -> list[int]:
    """The other machines in the order in which this one measures with them: in each round every machine is in one
    pair at most, the pairs of all rounds are all pairs (the circle method of tournaments)."""
    size = count + count % 2
    order = []
    for turn in range(size - 1):
        circle = [0, *((place + turn) % (size - 1) + 1 for place in range(size - 1))]
        here = circle.index(rank)
        other = circle[size - 1 - here]
        if other < count:  # an odd number of machines: one rests
            order.append(other)
    return order
