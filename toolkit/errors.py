"""Errors that a user can fix: what is wrong, where, and the command or setting that fixes it."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn


class UserError(Exception):
    """An error in the input, the settings or the launch, not in the program. One process prints it
    as one line, without a traceback (see `toolkit.launch.run`)."""


class Parser(argparse.ArgumentParser):
    """argparse, with a UserError instead of its usage page."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def system_error_line(error: BaseException) -> str | None:
    """One line for an error that names its file, or of memory; None for others, which need a
    traceback."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory: {error}"
    if re.search(r"\(os error \d+\)", str(error)):  # safetensors
        return str(error)
    return None


class Faults(list[str]):
    """Errors, collected so that a user sees all of them at once."""

    add = list.append

    def raise_if_any(self) -> None:
        """Raises UserError with all errors collected so far."""
        if len(self) == 1:
            raise UserError(self[0])
        if self:
            listed = "".join(
                f"\n  {number}. {fault}" for number, fault in enumerate(self, 1)
            )
            raise UserError(f"{len(self)} faults:{listed}")


@contextlib.contextmanager
def explain_errors(what: str) -> Iterator[None]:
    """Turns an error of a library that reads what a stranger wrote into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{what}: {printable(error, 200)}") from error


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` (did you mean X?)` for the most similar known name, or empty."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, or the error's class name."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust, as tokenizers, gave up: no `Exception`, and of no importable
    class."""
    return type(error).__name__ == "PanicException"


# of a terminal's escape sequences, of directions, and lone surrogates, which no file can hold
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    """A text that does nothing to a terminal: control and direction characters, other than line
    breaks and tabs, become `\\u001b`, which JSON reads as the same character."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable(text: object, limit: int = 1000) -> str:
    """The first `limit` characters of a text from a peer or a program, as one line that is safe to
    print on a terminal."""
    return " ".join(_CONTROL.sub(" ", str(text)).split())[:limit]


def listing(items: Iterable[object], limit: int = 10) -> str:
    """`a, b, c and 7 more`: at most `limit` items."""
    texts = [str(item) for item in items]
    shown = ", ".join(texts[:limit])
    if len(texts) <= limit:
        return shown
    return f"{shown} and {len(texts) - limit} more"


def size_text(size: float) -> str:
    """Bytes as `1.34 GB`, `12.5 MB`, `980 bytes`: powers of ten, three digits."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * power:
            return f"{size / power:.3g} {unit}"
    return f"{size:.0f} bytes"
