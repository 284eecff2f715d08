"""What may be wrong with the classes of a label column: lines for the user."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from toolkit.data.table import Table
from toolkit.errors import listing

_NO_LABEL = re.compile(
    r"[-–—_?？./\\*]+|-\d\d+|n/?a|nan|none|null|unk(nown)?|无|空|未知|不详|缺失|未标注|无标签",
    re.IGNORECASE,
)
_SEPARATORS = (",", "，", "、", ";", "；", "|", "/", "+", "#", "&", " ")
_OFTEN = 100


def notes_on_classes(
    names: Sequence[str], encoded: np.ndarray, counts: np.ndarray, table: Table
) -> Iterator[str]:
    """Classes whose names may mean no label, several labels, or be typing errors. `encoded`:
    (rows,) class ids, or (rows, classes) flags; `counts`: the rows of each class."""
    unlabelled = [repr(name) for name in names if _NO_LABEL.fullmatch(name)]
    if unlabelled:
        remedy = "empty these cells and pass --drop_empty_text"
        yield f"if class {listing(unlabelled)} means that a row has no label: {remedy}"
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault("".join(name.split()).casefold(), []).append(repr(name))
    for group in alike.values():
        if len(group) > 1:
            yield f"classes {listing(group)} have almost the same name: write it in one way"
    rare = np.flatnonzero(counts == 1)
    if len(rare) and counts.max() >= _OFTEN:
        is_rare = (
            np.isin(encoded, rare) if encoded.ndim == 1 else encoded[:, rare].any(axis=1)
        )
        rows = table.listing(table.row_numbers[is_rare])
        classes = listing(repr(names[place]) for place in rare)
        yield f"class {classes} has one row, is it a typing error? (row {rows})"
    hint = separator_hint(names)
    if encoded.ndim == 1 and hint:
        yield hint


def separator_hint(names: Sequence[str]) -> str:
    """What to pass if the names are joins of fewer names, as `a,b` is of `a` and `b`; or empty."""
    for separator in _SEPARATORS:
        split = [[part.strip() for part in name.split(separator)] for name in names]
        parts = {part for one in split for part in one}
        repeats = any(len(set(one)) < len(one) for one in split)
        if len(parts) < len(names) and not repeats:
            return (
                f"{len(names)} classes are joins of {len(parts)} names: if a cell holds several "
                f"labels, pass --label_separator {separator!r}"
            )
    return ""
