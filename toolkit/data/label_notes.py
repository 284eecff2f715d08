"""What may be wrong with the classes of a label column: lines for the user."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from toolkit.data.tokens import Split
from toolkit.errors import listing

_SIGNS = r"[\s_?？./\\*#<>()（）【】–—…-]*"
_NO_LABEL = re.compile(
    r"-\d\d+|"
    + _SIGNS
    + r"(n[./]?a|nan|nil|none|null|unk(nown)?|undefined|missing|empty|blank|tbd"
    r"|(no|un|not)[\s_-]?label(l?ed)?|[无無空]|空白|暂无|没有|未知|不详|不明|缺失|待定"
    r"|[未待无無](标注|標註|标签|標籤|分类|分類|填写|填寫))?" + _SIGNS,
    re.IGNORECASE,
)
_SEPARATORS = ("||", *",，、;；|/\\+#&")
_IN_NAMES = tuple(" -_:.·和")
"""Separators that names have, too: `very good`."""
_DECIMAL = re.compile(r"-?\d+(,\d+)?")
_OFTEN = 100


def notes_on_names(names: Sequence[str]) -> Iterator[str]:
    """Classes that may be no label, or the same as another."""
    unlabelled = [repr(name) for name in names if _NO_LABEL.fullmatch(name)]
    if {"-1", "2"} <= set(names) and "-2" not in names:  # -1, 0, 1 are three classes
        unlabelled.append("'-1'")
    if unlabelled:
        remedy = "empty these cells and pass --drop_empty_text"
        yield f"if class {listing(unlabelled)} means that a row has no label: {remedy}"
    if all(map(_DECIMAL.fullmatch, names)) and any("," in name for name in names):
        yield f"if the labels are numbers, {names[-1]!r} needs a point instead of the comma"
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault("".join(name.split()).casefold(), []).append(repr(name))
    for group in alike.values():
        if len(group) > 1:
            yield f"classes {listing(group)} have almost the same name: write it in one way"


def note_on_rare(names: Sequence[str], counts: np.ndarray, train: Split) -> Iterator[str]:
    """Classes of a single row beside large ones. `counts`: (classes,) rows of each."""
    rare = np.flatnonzero(counts == 1)
    if not len(rare) or counts.max() < _OFTEN:
        return
    if train.labels.ndim == 1:
        rows = np.flatnonzero(np.isin(train.labels, rare))
        classes = train.labels[rows]
    else:
        rows, columns = np.nonzero(train.labels[:, rare])
        classes = rare[columns]
    pairs = zip(classes, train.rows[rows] + 1, strict=True)
    found = listing(f"{names[place]!r} (row {row})" for place, row in pairs)
    yield f"classes of one row in train, which may be typing errors: {found}"


def separator_hint(names: Sequence[str], passed: str | None = None) -> str:
    """What to do if the names are joins of fewer names, as `a,b` is of `a` and `b`; or empty.
    `passed`: the --label_separator."""
    for separator in (*_SEPARATORS, *_IN_NAMES):
        split = [[part.strip() for part in name.split(separator)] for name in names]
        parts = {part for one in split for part in one}
        is_doubtful = any(len(set(one)) < len(one) for one in split)
        if separator in _IN_NAMES:
            is_doubtful = is_doubtful or not parts <= set(names)
        if len(parts) < len(names) and not is_doubtful:
            remedy = f"pass --label_separator '{separator}'"
            if passed:
                remedy = f"write '{passed}' for '{separator}' in the file, too"
            joined = f"{len(names)} classes are joins of {len(parts)} names"
            return f"{joined}: if a cell holds several labels, {remedy}"
    return ""
