"""Titles in report.html: random, best and worst ones, and how many are empty or the same."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.report.files import Record
from toolkit.report.html import truncate

_EXAMPLES = 8
"""Titles of each kind."""


def examples(record: Record, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Variables of page.html."""
    lines = record.of_last(list(record.predictions(folder)))
    titles = [line["title"].strip() for line in lines]

    def example(index: int) -> dict[str, Any]:
        line = lines[index]
        parts = {
            "text": texts[index] if texts else "",
            "title": titles[index],
            "reference": line["reference"],
        }
        shown = {name: truncate(part) for name, part in parts.items()}
        return shown | {"row": line["id"] + 1, "rouge": line["scores"]["rougeL"]}

    example_indices = _choose([line["scores"]["rougeL"] for line in lines])
    commonest = collections.Counter(filter(None, titles)).most_common(1)
    return {
        "examples": {name: [*map(example, indices)] for name, indices in example_indices.items()},
        "num_titles": len(titles),
        "num_empty": titles.count(""),
        "commonest": [(truncate(title), count) for title, count in commonest if count > 1],
    }


def _choose(rouge: Sequence[float]) -> dict[str, Sequence[int]]:
    """Kind -> indices of example titles; the random ones are the same in every run on the same samples."""
    indices = range(len(rouge))
    if len(rouge) <= _EXAMPLES:
        return {"all": indices} if rouge else {}
    ordered, few = sorted(indices, key=lambda index: rouge[index]), min(_EXAMPLES, len(rouge) // 2)
    sample = sorted(random.Random(0).sample(indices, _EXAMPLES))
    return {"random": sample, "worst": ordered[:few], "best": ordered[: -few - 1 : -1]}
