"""The errors a user can mend: what is wrong, where, and what to type."""

from __future__ import annotations

import argparse
import difflib
import errno
import re
import traceback
from collections.abc import Iterable
from typing import NoReturn


class UserError(Exception):
    """A fault in the input, the settings or the way of starting, not in the program.

    It is printed as one line by one process (see `toolkit.launch.run`), without a traceback.
    """


class Parser(argparse.ArgumentParser):
    """argparse, with our error line instead of its usage page."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


# of the machine, its disks and its permissions: no fault of the program
_OF_FILES = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOENT, errno.ENOTDIR,
    errno.EISDIR, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE, errno.EBUSY,
}  # fmt: skip


def system_error_line(error: BaseException) -> str | None:
    """What a fault of files or memory says in one line, with the file's name; None for others, which need a traceback.

    A RecursionError counts where a file was read that is nested too deep.
    """
    last = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    where = f" ({last.filename}, line {last.lineno})" if last else ""
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        return f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}{where}"
    if isinstance(error, MemoryError):
        return f"out of memory: {error}{where}"
    if isinstance(error, RecursionError) and last and re.search(r"[/\\](json|yaml)[/\\]", last.filename):
        return f"a file is nested too deep to be read{where}"
    return str(error) if re.search(r"\(os error \d+\)", str(error)) else None  # of safetensors


class Faults:
    """Collects faults so that a user sees all of them at once."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def add(self, fault: str) -> None:
        self.faults.append(fault)

    def raise_if_any(self) -> None:
        """Raises UserError with every fault collected so far."""
        if len(self.faults) == 1:
            raise UserError(self.faults[0])
        if self.faults:
            listed = "".join(f"\n  {number}. {fault}" for number, fault in enumerate(self.faults, 1))
            raise UserError(f"{len(self.faults)} faults:{listed}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest known name, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def first_line(error: BaseException) -> str:
    """The first line of another library's message, or the name of its error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def last_error(text: str) -> str:
    """Of what a run has printed: the last line with an error, or its last line."""
    lines = text.strip().splitlines() or [""]
    line = next((line for line in reversed(lines) if "error:" in line), lines[-1])
    return line.partition("error: ")[2] or line


# no escape sequences, no lines of its own, no half of a surrogate pair, which cannot be written anywhere
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")


def printable(text: object, most: int = 1000) -> str:
    """At most so many characters of a text that a peer or a program has sent, fit for a terminal."""
    return _UNPRINTABLE.sub(" ", str(text))[:most].strip()


def listing(items: Iterable[object], most: int = 10) -> str:
    """`a, b, c` with a count of what was left out after `most` items."""
    texts = [str(item) for item in items]
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")
