"""The language of a run's lines and pages (`--language`).

The program is written in English. A table, `zh.json`, has its sentences in another language, with
the same `{names}` of values: `pages` by a template's sentence, and `lines`, which a whole printed
line is matched with, so that the code that makes a line knows no language. What the table lacks
stays English."""

from __future__ import annotations

import json
import re
from pathlib import Path


class Language:
    """Translates from English. Numbers and names stay as they are."""

    def __init__(self, name: str) -> None:
        """`name`: en, or that of a table."""
        self._pages: dict[str, str] = {}
        self._lines: dict[re.Pattern[str], str] = {}
        if name == "en":
            return
        path = Path(__file__).with_name(f"{name}.json")
        table = json.loads(path.read_text(encoding="utf-8"))
        self._pages = table["pages"]
        for english, translated in table["lines"].items():
            self._lines[_pattern(english)] = translated

    def sentence(self, english: str) -> str:
        """A sentence of a page, with its names in braces."""
        return self._pages.get(english, english)

    def line(self, english: str) -> str:
        """A line as it is printed."""
        for pattern, translated in self._lines.items():
            match = pattern.fullmatch(english)
            if match:
                # a value may be a sentence, too: `a, b and 12 more`
                values = {name: self.line(text) for name, text in match.groupdict().items()}
                return translated.format(**values)
        return english


def _pattern(template: str) -> re.Pattern[str]:
    """`{count} rows of {name}` -> a pattern with the groups `count`, a number, and `name`."""
    literal = re.escape(template).replace(r"\{count\}", r"(?P<count>[\d,]+)")
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", literal), re.DOTALL)
