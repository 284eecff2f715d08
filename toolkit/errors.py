"""The errors a user can mend: what is wrong, where, and what to type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A fault in the input, the settings or the way of starting, not in the program.

    It is printed as one line by one process (see `toolkit.launch.run`), without a traceback.
    """


class Faults:
    """Collects faults so that a user sees all of them at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, fault: str) -> None:
        self.found.append(fault)

    def raise_if_any(self) -> None:
        """Raises UserError with every fault collected so far."""
        if len(self.found) == 1:
            raise UserError(self.found[0])
        if self.found:
            listed = "".join(f"\n  {number}. {fault}" for number, fault in enumerate(self.found, 1))
            raise UserError(f"{len(self.found)} faults:{listed}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest known name, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def first_line(error: BaseException) -> str:
    """The first line of another library's message, or the name of its error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def listing(items: Iterable[object], most: int = 10) -> str:
    """`a, b, c` with a count of what was left out after `most` items."""
    texts = [str(item) for item in items]
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")
