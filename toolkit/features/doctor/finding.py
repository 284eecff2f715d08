"""What a check finds, the line to type for it, and the report that people read."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["ok", "note", "warn", "fail"]
_MARKS: dict[Level, str] = {"ok": "ok", "note": "--", "warn": "!!", "fail": "FAIL"}
_ORDER = ("files", "versions", "devices", "host", "builds", "shell", "network", "machines", "links", "all-reduce")


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


def read_text(path: str | Path) -> str:
    """The content of a small file, stripped; empty where it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""


def report(findings: Sequence[Finding]) -> str:
    """Findings grouped by area; a mark, a name and a text per line, what to type below it."""
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.area) if finding.area in _ORDER else 99)
    width = max((len(finding.name) for finding in ordered), default=0)
    lines = []
    for area, group in itertools.groupby(ordered, key=lambda finding: finding.area):
        lines.append(area)
        for finding in group:
            where = f"[{finding.host}] " if finding.host else ""
            lines.append(f"  {_MARKS[finding.level]:<4}  {finding.name:<{width}}  {where}{finding.text}")
            if finding.remedy:
                lines.append(f"  {'':<4}  {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def last_line(findings: Sequence[Finding], start: str) -> str:
    """`2 failures, 1 warning; first: ...`; where nothing failed, `start` is what to type next."""
    failures = [finding for finding in findings if finding.level == "fail"]
    warnings = [finding for finding in findings if finding.level == "warn"]
    if not failures and not warnings:
        return f"all well: start with `{start}`" if start else "all well"
    counts = [f"{len(found)} {word}{'s' * (len(found) != 1)}"
              for found, word in ((failures, "failure"), (warnings, "warning")) if found]  # fmt: skip
    first = (failures or warnings)[0]
    line = f"{', '.join(counts)}; first: {f'on {first.host}: ' if first.host else ''}{first.text}"
    return line if failures or not start else f"{line}\nno failure: start with `{start}`"
