"""Titles on the page of a run: some of each kind, and how many are empty or copied."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.report.html import check_number, shortened
from toolkit.report.record import Record

HANDFUL = 8
"""Titles that are shown of each kind."""


@dataclass(frozen=True, slots=True)
class Title:
    """A line of predictions.jsonl of a run that writes titles."""

    place: int
    row: int
    written: str
    reference: str
    rouge: float
    """ROUGE-L."""


def examples(record: Record, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """The variables of the section; in its counts letter case and spaces do not matter."""
    titles = [
        Title(place, line["id"] + 1, line["title"].strip(), line["reference"], line["scores"]["rougeL"])
        for place, line in enumerate(record.predictions(folder))
    ]
    check_number(folder, len(titles), texts)

    def example(title: Title) -> tuple[Title, str, str, str]:
        """(it, its text, what was written, the reference), the three as they are shown."""
        text = texts[title.place] if texts else ""
        return title, shortened(text), shortened(title.written), shortened(title.reference)

    plain = [_plain(title.written) for title in titles]
    commonest = collections.Counter(title.written for title in titles if title.written).most_common(1)
    return {
        "examples": {name: [*map(example, handful)] for name, handful in _handfuls(titles).items()},
        "num_titles": len(titles),
        "num_empty": plain.count(""),
        "num_copies": sum(text == _plain(title.reference) for text, title in zip(plain, titles, strict=True)),
        "num_lifted": sum(title != "" and title in _plain(text) for title, text in zip(plain, texts, strict=False)),
        "commonest": [(shortened(written), count) for written, count in commonest if count > 1],
    }


def _handfuls(titles: Sequence[Title]) -> dict[str, list[Title]]:
    """Which titles are shown; those at random are the same rows in every run on the same samples."""
    if len(titles) <= HANDFUL:
        return {"all": list(titles)} if titles else {}
    sample = random.Random(0).sample(range(len(titles)), HANDFUL)
    ordered = sorted(titles, key=lambda title: title.rouge)
    few = min(HANDFUL, len(titles) // 2)
    return {
        "random": [titles[place] for place in sorted(sample)],
        "worst": ordered[:few],
        "best": ordered[: -few - 1 : -1],
    }


def _plain(text: str) -> str:
    return "".join(text.casefold().split())
