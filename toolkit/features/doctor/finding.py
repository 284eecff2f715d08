"""The results of checks, each with a remedy, and the report that lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fail"]
_MARKS: dict[Level, str] = {"ok": "ok", "note": "--", "warn": "!!", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; after a `fail` a run cannot work."""

    name: str
    level: Level
    text: str
    remedy: str = ""
    """The command to type, or what to look at."""


Areas = dict[str, list[Finding]]
"""Heading of the report -> findings."""


def report(areas: Mapping[str, Sequence[Finding]]) -> str:
    """A heading for each area, a line for each finding, the remedy below it."""
    width = max(
        (len(finding.name) for findings in areas.values() for finding in findings), default=0
    )
    lines = []
    for area, findings in areas.items():
        lines += [area] * bool(findings)
        for finding in findings:
            lines.append(f"  {_MARKS[finding.level]:<4}  {finding.name:<{width}}  {finding.text}")
            if finding.remedy:
                lines.append(f"  {'':<4}  {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def summary(levels: Sequence[Level]) -> str:
    """`failures: 2, warnings: 1`, or `no problems found`."""
    failures, warnings = levels.count("fail"), levels.count("warn")
    return (
        f"failures: {failures}, warnings: {warnings}"
        if failures or warnings
        else "no problems found"
    )
