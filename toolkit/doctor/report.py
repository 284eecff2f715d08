"""What was found, for people and for programs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from toolkit.doctor.finding import Finding, worst

_MARKS = {"ok": "ok", "note": "--", "warn": "!!", "fail": "FAIL"}
_ORDER = ("files", "versions", "devices", "host", "builds", "shell", "network", "machines", "links", "all-reduce")


def text_of(findings: Sequence[Finding]) -> str:
    """Grouped by area; a mark, a name and a text per line, what to type below it."""
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.area) if finding.area in _ORDER else 99)
    width = max((len(finding.name) for finding in ordered), default=0)
    blocks = []
    for area, group in itertools.groupby(ordered, key=lambda finding: finding.area):
        blocks.append("\n".join([area, *(_lines(finding, width) for finding in group)]))
    return "\n".join(blocks)


def _lines(finding: Finding, width: int) -> str:
    where = f"[{finding.host}] " if finding.host else ""
    line = f"  {_MARKS[finding.level]:<4}  {finding.name:<{width}}  {where}{finding.text}"
    return f"{line}\n  {'':<4}  {'':<{width}}  -> {finding.remedy}" if finding.remedy else line


def last_line(findings: Sequence[Finding], start: str) -> str:
    """`2 failures, 1 warning; first: ...`; where nothing failed, `start` is what to type next."""
    failures = [finding for finding in findings if finding.level == "fail"]
    warnings = [finding for finding in findings if finding.level == "warn"]
    counts = [_count(len(failures), "failure")] if failures else []
    counts += [_count(len(warnings), "warning")] if warnings else []
    if not counts:
        return f"all well: start with `{start}`" if start else "all well"
    first = (failures or warnings)[0]
    where = f"on {first.host}: " if first.host else ""
    line = f"{', '.join(counts)}; first: {where}{first.text}"
    return line if failures or not start else f"{line}\nno failure: start with `{start}`"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Columns side by side; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def all_well(findings: Sequence[Finding]) -> bool:
    return worst(findings) != "fail"
