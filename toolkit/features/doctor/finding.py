"""The results of checks, each with a remedy, and the report that lists them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
    area: str = ""
    """The heading in the report."""


def in_area(area: str, findings: Iterable[Finding]) -> list[Finding]:
    """Sets the area of the findings that have none."""
    return [finding if finding.area else replace(finding, area=area) for finding in findings]


def report(findings: Sequence[Finding]) -> str:
    """A heading for each area, a line for each finding, the remedy below it."""
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
    """`2 failures, 1 warning; first: ...`; where nothing failed, `start` is the command to type next."""
    failures = [finding.text for finding in findings if finding.level == "fail"]
    warnings = [finding.text for finding in findings if finding.level == "warn"]
    if not failures and not warnings:
        return f"all well: start with `{start}`" if start else "all well"
    counts = [f"{len(texts)} {word}{'s' * (len(texts) > 1)}"
              for texts, word in ((failures, "failure"), (warnings, "warning")) if texts]  # fmt: skip
    line = f"{', '.join(counts)}; first: {(failures or warnings)[0]}"
    return line if failures or not start else f"{line}\nno failure: start with `{start}`"
