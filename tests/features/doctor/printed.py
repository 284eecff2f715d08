"""What `toolkit doctor` printed."""

import itertools
import re

from toolkit.features.doctor.machine import Finding

LINE = re.compile(r"  (ok|note|warn|FAIL) +(\S.*?)  +(\S.*)")


def findings_in(out: str) -> dict[str, Finding]:
    """By name, each with the remedy below it."""
    findings = {}
    for line, following in itertools.pairwise(out.splitlines()):
        match = LINE.fullmatch(line)
        if match:
            level, name, text = match.groups()
            _, _, remedy = following.partition("  -> ")
            findings[name] = Finding(name, level, text, remedy)  # type: ignore[arg-type]
    return findings
