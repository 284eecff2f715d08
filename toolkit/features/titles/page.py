"""Titles on the page of a run: some of each kind, and how many are empty or copied."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.report.html import check_number, shortened
from toolkit.report.record import Record

HANDFUL = 8
"""Titles that are shown of each kind."""


def examples(record: Record, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """The variables of the section; in its counts letter case and spaces do not matter."""
    lines = list(record.predictions(folder))
    check_number(folder, len(lines), texts)
    titles = [line["title"].strip() for line in lines]

    def example(place: int) -> dict[str, Any]:
        line, text = lines[place], texts[place] if texts else ""
        shown = {"text": text, "title": titles[place], "reference": line["reference"]}
        return {name: shortened(part) for name, part in shown.items()} | {
            "row": line["id"] + 1,
            "rouge": line["scores"]["rougeL"],
        }

    handfuls = _handfuls([line["scores"]["rougeL"] for line in lines])
    plain, references = [*map(_plain, titles)], [_plain(line["reference"]) for line in lines]
    commonest = collections.Counter(filter(None, titles)).most_common(1)
    return {
        "examples": {name: [*map(example, places)] for name, places in handfuls.items()},
        "num_titles": len(titles),
        "num_empty": plain.count(""),
        "num_copies": sum(title == reference for title, reference in zip(plain, references, strict=True)),
        "num_lifted": sum(title != "" and title in _plain(text) for title, text in zip(plain, texts, strict=False)),
        "commonest": [(shortened(title), count) for title, count in commonest if count > 1],
    }


def _handfuls(rouge: Sequence[float]) -> dict[str, Sequence[int]]:
    """Places of the titles that are shown; those at random are the same rows in every run on the same samples."""
    places = range(len(rouge))
    if len(rouge) <= HANDFUL:
        return {"all": places} if rouge else {}
    ordered, few = sorted(places, key=lambda place: rouge[place]), min(HANDFUL, len(rouge) // 2)
    sample = sorted(random.Random(0).sample(places, HANDFUL))
    return {"random": sample, "worst": ordered[:few], "best": ordered[: -few - 1 : -1]}


def _plain(text: str) -> str:
    return "".join(text.casefold().split())
