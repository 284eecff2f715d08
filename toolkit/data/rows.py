"""Which rows of a table take part, and on which side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """(samples, ...), as `Targets.encode` gives them; empty before they are known."""
    pairs: Sequence[str] | None = None
    """The second text of each."""

    def take(self, places: np.ndarray) -> Rows:
        return replace(
            self,
            texts=[self.texts[place] for place in places],
            numbers=self.numbers[places],
            targets=self.targets[places] if len(self.targets) else self.targets,
            pairs=None if self.pairs is None else [self.pairs[place] for place in places],
        )


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


def pair_column(table: Table, wanted: str | None, column: str) -> str | None:
    """The column of second texts that was named. Raises UserError when it is missing or the first text's."""
    if wanted is not None and wanted in columns_of(table, column):
        raise UserError(f"--text_pair {wanted} is the first text's column too: name another, or leave it out")
    return find_column(table, wanted, (), "text_pair")


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


def usable_rows(table: Table, column: str, pair: str | None, drop_empty: bool, notes: list[str]) -> Rows:
    """The rows whose text, or neither of whose texts, is empty. Raises UserError naming the others."""
    texts = texts_of(table, column)
    pairs = None if pair is None else texts_of(table, pair)
    full = np.ones(len(texts), bool)
    for name, found, setting in ((column, texts, "text_column"), (pair, pairs, "text_pair")):
        if found is not None:
            full &= _check_full(table, str(name), found, setting, drop_empty)
    if not full.all():
        notes.append(f"{table.name}: {int((~full).sum())} rows with an empty text are left out")
    return Rows(table, texts, np.arange(len(texts)), np.zeros(0), pairs).take(np.flatnonzero(full))


def _check_full(table: Table, column: str, texts: Sequence[str], setting: str, drop_empty: bool) -> np.ndarray:
    """(rows,) bool. Raises UserError where no text may be empty and some are, or all are."""
    empty = [row for row, text in enumerate(texts) if not text.strip()]
    if len(empty) == len(texts):
        raise UserError(f"{table.name}: every text in column {column!r} is empty: name another with --{setting}")
    if empty and not drop_empty:
        rows = listing(row + 1 for row in empty)
        raise UserError(
            f"{table.name}: the text in column {column!r} is empty in {len(empty)} of {len(texts)} rows (rows {rows}): "
            "fill them, or pass --drop_empty_text"
        )
    return np.isin(np.arange(len(texts)), empty, invert=True)


def with_targets(rows: Rows, targets: Targets, notes: list[str]) -> Rows:
    """Those rows that have a target. Raises UserError when there are none."""
    present = ~np.isin(rows.numbers, targets.missing(rows.table, rows.numbers))
    if not present.any():
        raise UserError(f"{rows.table.name}: no row has a title: name another column with --title_column")
    if not present.all():
        notes.append(f"{rows.table.name}: {int((~present).sum())} rows without a title are left out")
    return rows.take(np.flatnonzero(present))


def long_enough(rows: Rows, min_length: int, tokenizer: Any, notes: list[str]) -> Rows:
    """Those with at least `min_length` tokens. Raises UserError when there are none."""
    name = rows.table.name
    arrays, _ = tokens.encode(tokenizer, rows.texts, min_length, progress=f"lengths of {name}", pairs=rows.pairs)
    places = np.flatnonzero(np.diff(arrays["offsets"]) >= min_length)
    if not len(places):
        raise UserError(f"{name}: no text has {min_length} tokens: lower --min_length, or leave it out")
    fewer = f"fewer than {min_length} tokens and are left out (--min_length)"
    notes.append(f"{name}: {len(rows.texts) - len(places)} of {len(rows.texts)} texts have {fewer}")
    return rows.take(places)


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
    """Texts (or pairs of them) of another split that also stand in training."""
    train = set(_read_of(chosen["train"]))
    for split in ("validation", "test"):
        texts = _read_of(chosen[split]) if split in chosen else []
        seen = sum(text in train for text in texts)
        if seen:
            notes.append(f"{split}: {seen} of {len(texts)} texts also stand in training: their scores flatter")


def _read_of(rows: Rows) -> list[tuple[str, ...]]:
    """What the model reads of each row."""
    return list(zip(rows.texts, *(() if rows.pairs is None else (rows.pairs,)), strict=True))


def _is_string(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")
