"""What a check finds, the line to type for it, and the report that people read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fail"]
_MARKS: dict[Level, str] = {"ok": "ok", "note": "--", "warn": "!!", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One line of the report: `ok`, a `note`, a `warn`ing, or a `fail`ure for which a run cannot work as meant."""

    area: str
    """The heading of the report."""
    name: str
    level: Level
    text: str
    remedy: str = ""
    """The line to type, or what to look at."""


def report(findings: Sequence[Finding]) -> str:
    """Findings by area; a mark, a name and a text per line, the remedy below it."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for area, group in itertools.groupby(findings, key=lambda finding: finding.area):
        lines.append(area)
        for finding in group:
            lines.append(f"  {_MARKS[finding.level]:<4}  {finding.name:<{width}}  {finding.text}")
            if finding.remedy:
                lines.append(f"  {'':<4}  {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def summary(findings: Sequence[Finding], start: str) -> str:
    """`2 failures, 1 warning; first: ...`; where nothing failed, `start` is what to type next."""
    failures = [finding.text for finding in findings if finding.level == "fail"]
    warnings = [finding.text for finding in findings if finding.level == "warn"]
    if not failures and not warnings:
        return f"all well: start with `{start}`" if start else "all well"
    counts = [f"{len(texts)} {word}{'s' * (len(texts) > 1)}"
              for texts, word in ((failures, "failure"), (warnings, "warning")) if texts]  # fmt: skip
    line = f"{', '.join(counts)}; first: {(failures or warnings)[0]}"
    return line if failures or not start else f"{line}\nno failure: start with `{start}`"
