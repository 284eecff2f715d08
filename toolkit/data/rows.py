"""Which rows of a table take part, and on which side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from toolkit.data import tokens
from toolkit.data.read import Table, find_column
from toolkit.errors import UserError, listing

USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "article", "文本", "内容", "评论", "正文")


class Targets(Protocol):
    """What is learned from a text: `toolkit.data.labels.Labels` or `toolkit.data.titles.Titles`."""

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray: ...

    def missing(self, table: Table, rows: np.ndarray) -> np.ndarray: ...

    def all_missing(self, table: Table) -> bool: ...

    def strata(self, encoded: np.ndarray) -> np.ndarray | None: ...

    def arrays(self, split: str, encoded: np.ndarray, tokenizer: Any, notes: list[str]) -> dict[str, np.ndarray]: ...

    def written(self, encoded: np.ndarray) -> list[str] | None: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Rows:
    """Rows of a table that take part."""

    table: Table
    texts: Sequence[str]
    numbers: np.ndarray
    """(samples,) int64, their places in the table, from 0."""
    targets: np.ndarray
    """(samples, ...), as `Targets.encode` gives them."""

    def take(self, places: np.ndarray) -> Rows:
        return Rows(self.table, [self.texts[place] for place in places], self.numbers[places], self.targets[places])


def text_column(table: Table, wanted: str | None) -> str:
    """The column to read, or several, `title,text`. Raises UserError when it cannot be told."""
    if wanted and len(parts := columns_of(table, wanted)) > 1:
        for part in parts:
            find_column(table, part, (), "text_column")
        return ",".join(parts)
    column = find_column(table, wanted, USUAL_TEXT, "text_column")
    if column is not None:
        return column
    strings = [name for name, feature in table.rows.features.items() if _is_string(feature)]
    if len(strings) == 1:
        return strings[0]
    raise UserError(
        f"{table.name}: which column is the text? Name one of {listing(table.rows.column_names)} with --text_column"
    )


def columns_of(table: Table, column: str) -> list[str]:
    """`title,text` -> both, unless a column has that very name."""
    if column in table.rows.column_names:
        return [column]
    return [part for name in column.split(",") if (part := name.strip())]


def texts_of(table: Table, column: str) -> list[str]:
    """The text of every row; several columns stand below each other. Raises UserError for one that is missing."""
    columns = columns_of(table, column)
    for name in columns:
        if name not in table.rows.column_names:
            raise UserError(f"{table.name} has no text column {name!r}: it has {listing(table.rows.column_names)}")
    cells = zip(*(table.rows[name] for name in columns), strict=True)
    if len(columns) == 1:
        return ["" if text is None else str(text) for (text,) in cells]
    return ["\n".join(str(text) for text in row if text is not None and str(text).strip()) for row in cells]


def usable_texts(table: Table, column: str, drop_empty: bool, notes: list[str]) -> tuple[list[str], np.ndarray]:
    """(texts, their row numbers from 0). Raises UserError naming the rows whose text is empty."""
    texts = texts_of(table, column)
    empty = [row for row, text in enumerate(texts) if not text.strip()]
    if len(empty) == len(texts):
        raise UserError(f"{table.name}: every text in column {column!r} is empty: name another with --text_column")
    if empty and not drop_empty:
        rows = listing(row + 1 for row in empty)
        raise UserError(
            f"{table.name}: the text in column {column!r} is empty in {len(empty)} of {len(texts)} rows (rows {rows}): "
            "fill them, or pass --drop_empty_text"
        )
    if empty:
        notes.append(f"{table.name}: {len(empty)} rows with an empty text are left out")
    dropped = set(empty)
    kept = np.array([row for row in range(len(texts)) if row not in dropped], np.int64)
    return [texts[row] for row in kept], kept


def with_targets(
    table: Table, texts: list[str], kept: np.ndarray, targets: Targets, notes: list[str]
) -> tuple[list[str], np.ndarray]:
    """(texts, row numbers) of those rows that have a target. Raises UserError when there are none."""
    present = ~np.isin(kept, targets.missing(table, kept))
    if not present.any():
        raise UserError(f"{table.name}: no row has a title: name another column with --title_column")
    if not present.all():
        notes.append(f"{table.name}: {int((~present).sum())} rows without a title are left out")
    return [texts[place] for place in np.flatnonzero(present)], kept[present]


def long_enough(
    table: Table, texts: list[str], kept: np.ndarray, min_length: int, tokenizer: Any, notes: list[str]
) -> tuple[list[str], np.ndarray]:
    """(texts, row numbers) of those with at least `min_length` tokens. Raises UserError when there are none."""
    arrays, _ = tokens.encode(tokenizer, texts, min_length, progress=f"lengths of {table.name}")
    places = np.flatnonzero(np.diff(arrays["offsets"]) >= min_length)
    if not len(places):
        raise UserError(f"{table.name}: no text has {min_length} tokens: lower --min_length, or leave it out")
    left = len(texts) - len(places)
    fewer = f"fewer than {min_length} tokens and are left out (--min_length)"
    notes.append(f"{table.name}: {left} of {len(texts)} texts have {fewer}")
    return [texts[place] for place in places], kept[places]


def sampled(rows: Rows, split: str, most: int | None, seed: int, notes: list[str]) -> Rows:
    """At most so many rows, chosen by the seed, in their order."""
    if most is None or most >= len(rows.texts):
        return rows
    setting = "max_train_samples" if split == "train" else "max_eval_samples"
    notes.append(f"{split}: {most} of {len(rows.texts)} rows are used (--{setting})")
    return rows.take(np.sort(np.random.default_rng(seed).permutation(len(rows.texts))[:most]))


def hold_back(rows: Rows, targets: Targets, share: float, seed: int, notes: list[str]) -> dict[str, Rows]:
    """Divides training rows into `train` and `validation`, by class where there are classes."""
    from sklearn.model_selection import train_test_split  # a second's import, needed once

    table = rows.table
    places = np.arange(len(rows.texts))
    singles = places[:0]
    classes = targets.strata(rows.targets)
    strata = None
    if classes is not None:
        alone = np.bincount(classes)[classes] < 2  # a class of one row can only be trained on
        singles, places, strata = places[alone], places[~alone], classes[~alone]
    held = max(1, round(len(places) * share))
    if held >= len(places):
        raise UserError(
            f"{table.name}: {len(rows.texts)} rows are too few to hold a part of {share:g} back for validation: give "
            "--validation_file, or another --validation_split"
        )
    if strata is not None and min(held, len(places) - held) < len(set(strata)):
        strata = None
        notes.append(f"{table.name}: too few rows to hold some of each class back")
    train_places, validation_places = train_test_split(places, test_size=held, random_state=seed, stratify=strata)
    parts = {"train": np.sort(np.concatenate([train_places, singles])), "validation": np.sort(validation_places)}
    notes.append(
        f"{table.name}: {len(parts['validation'])} of {len(rows.texts)} rows are held back for validation "
        f"(--validation_split {share:g}, seed {seed})"
    )
    return {split: rows.take(chosen) for split, chosen in parts.items()}


def note_overlap(chosen: dict[str, Rows], notes: list[str]) -> None:
    train = set(chosen["train"].texts)
    for split in ("validation", "test"):
        texts: Sequence[str] = chosen[split].texts if split in chosen else ()
        seen = sum(text in train for text in texts)
        if seen:
            notes.append(f"{split}: {seen} of {len(texts)} texts also stand in training: their scores flatter")


def _is_string(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")
