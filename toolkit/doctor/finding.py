"""What a check has found, and what to type for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

Level = Literal["ok", "note", "warn", "fail"]
LEVELS: tuple[Level, ...] = get_args(Level)
_MOST_CHARACTERS = 1000
# What another machine sends is shown on this one's terminal: no escape sequences, no lines of its own.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


@dataclass(frozen=True)
class Finding:
    """One line of the report: `ok`, a `note`, a `warn`ing, or a `fail`ure for which a run cannot work as meant."""

    area: str
    """The heading it stands under."""
    name: str
    level: Level
    text: str
    remedy: str = ""
    """The line to type, or what to look at."""
    host: str = ""
    """Where; empty for this machine, or for the machines together."""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def on(self, host: str) -> Finding:
        return replace(self, host=host)


def plain(text: object, most: int = _MOST_CHARACTERS) -> str:
    """Text that may have come from another machine or program, fit for a terminal."""
    printable = str(text).encode(errors="replace").decode()  # half a surrogate pair cannot be written anywhere
    return _UNPRINTABLE.sub(" ", printable)[:most].strip()


def read_finding(sent: object) -> Finding | None:
    """A finding another machine sent, or None for anything else."""
    if not isinstance(sent, Mapping) or sent.get("level") not in LEVELS:
        return None
    words = {name: plain(sent.get(name, "")) for name in ("area", "name", "text", "remedy", "host")}
    return Finding(level=sent["level"], **words)


def worst(findings: Sequence[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def whole_number(value: object, default: int = 0) -> int:
    """Of something that was sent: a whole number, or `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def number(value: object) -> float | None:
    """Of something that was sent: a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def mapping(value: object) -> dict[str, Any]:
    return {str(name): held for name, held in value.items()} if isinstance(value, Mapping) else {}


def size_of(count: float) -> str:
    """Bytes for people: `1.5 GB` (10^9 bytes)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"
