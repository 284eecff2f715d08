"""Which rows of a table take part, and on which side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from toolkit.data import tokens
from toolkit.data.read import Table, columns_of, find_columns
from toolkit.errors import UserError, listing

USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "article", "文本", "内容", "评论", "正文")
_NUMBER = re.compile(r"\s*[-+]?[\d.,]*(e[-+]?\d+)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Targets:
    """What is learned from a text: `toolkit.data.labels.Labels` or `toolkit.data.titles.Titles`."""

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> Targets:
        """What `dataclasses.asdict` made of it."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in loaded.items()})

    def facts(self) -> dict[str, Any]:
        """What a checkpoint and the run that goes on from it have in common. JSON."""
        raise NotImplementedError

    def describe(self) -> str:
        """What is learned, for the user."""
        raise NotImplementedError

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """(samples, ...): the targets of those rows. Raises UserError naming a row without one."""
        raise NotImplementedError

    def all_missing(self, table: Table) -> bool:
        """Whether a table has the column and nothing in it, as the test splits of many hub data sets."""
        raise NotImplementedError

    def strata(self, encoded: np.ndarray) -> np.ndarray | None:
        """The class of each sample, where there is one, so that a part held back has some of each."""
        return None

    def arrays(self, split: str, encoded: np.ndarray, tokenizer: Any, notes: list[str]) -> dict[str, np.ndarray]:
        """What is kept of them with the tokens."""
        return {"labels": encoded}

    def written(self, encoded: np.ndarray) -> list[str] | None:
        """What is kept for reports, where it cannot be read back from the arrays."""
        return None


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


def text_column(table: Table, wanted: str | None, taken: Iterable[str | None] = ()) -> str:
    """The column to read, or several, `title,text`: the named, one with a usual name, or the only one with texts beside
    those that are `taken`. Raises UserError when it cannot be told."""
    columns = find_columns(table, wanted, USUAL_TEXT, "text_column")
    if not columns:
        others = [name for name in table.rows.column_names if name not in taken]
        columns = tuple(name for name in others if _holds_texts(table, name))
        if len(columns) != 1:
            header = " (or all with --column_names, where the first line is no header)"
            raise table.which("text", "text_column", columns or others, header)
    return ",".join(columns)


def _holds_texts(table: Table, column: str) -> bool:
    """Neither numbers nor lists; CSV has its numbers as text."""
    if getattr(table.rows.features[column], "dtype", None) not in ("string", "large_string"):
        return False
    return not all(_NUMBER.fullmatch(str(cell or "")) for cell in table.rows[:100][column])


def pair_column(table: Table, wanted: str | None, column: str) -> str | None:
    """The column of second texts that was named. Raises UserError when it is missing or the first text's."""
    if wanted is not None and wanted in columns_of(table, column):
        raise UserError(f"--text_pair {wanted} is the first text's column too: name another, or leave it out")
    return ",".join(find_columns(table, wanted, (), "text_pair")) or None


def texts_of(table: Table, column: str, separator: str, what: str = "text") -> list[str]:
    """The text of every row; of several columns, with the separator between them. Raises UserError for one that is
    missing."""
    cells = [["" if text is None else str(text) for text in table.column(name, what)]
             for name in columns_of(table, column)]  # fmt: skip
    return cells[0] if len(cells) == 1 else [separator.join(filter(str.strip, row)) for row in zip(*cells, strict=True)]


def usable_rows(
    table: Table, columns: dict[str, str | None], separator: str, drop_empty: bool, notes: list[str]
) -> Rows:
    """The rows whose text is not empty, nor what else they must have: `columns` by the settings that name them, the
    text's first. Raises UserError naming the others."""
    cells, full = {}, np.ones(len(table.rows), bool)
    for setting, column in columns.items():
        if column is None:
            continue
        what = "title" if setting == "title_column" else "text"
        texts = cells[setting] = texts_of(table, column, separator, what)
        empty = np.array([not text.strip() for text in texts])
        if empty.all():
            raise UserError(f"{table.name}: every {what} in column {column!r} is empty: name another with --{setting}")
        if empty.any() and not drop_empty:
            raise UserError(
                f"{table.name}: the {what} in column {column!r} is empty in {empty.sum()} of {len(texts)} rows (rows "
                f"{listing(np.flatnonzero(empty) + 1)}): fill them, or pass --drop_empty_text"
            )
        full &= ~empty
    if not full.any():
        raise UserError(f"{table.name}: in every row one of {listing(filter(None, columns.values()))} is empty")
    if not full.all():
        kind = "text or title" if columns.get("title_column") else "text"
        notes.append(f"{table.name}: {int((~full).sum())} rows with an empty {kind} are left out")
    rows = Rows(table, cells["text_column"], np.arange(len(full)), np.zeros(0), cells.get("text_pair"))
    return rows.take(np.flatnonzero(full))


def long_enough(rows: Rows, min_length: int, tokenizer: Any, notes: list[str]) -> Rows:
    """Those with at least `min_length` tokens. Raises UserError when there are none."""
    name = rows.table.name
    arrays, _ = tokens.encode(tokenizer, rows.texts, min_length, what=f"lengths of {name}", pairs=rows.pairs)
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
    notes.append(
        f"{table.name}: {held} of {len(rows.texts)} rows are held back for validation "
        f"(--validation_split {share:g}, seed {seed})"
    )
    return {
        "train": rows.take(np.sort(np.concatenate([train_places, singles]))),
        "validation": rows.take(np.sort(validation_places)),
    }


def note_overlap(chosen: dict[str, Rows], notes: list[str]) -> None:
    """Texts (or pairs of them) of another split that are also in the training data."""
    read = {split: list(zip(rows.texts, rows.pairs or rows.texts, strict=True)) for split, rows in chosen.items()}
    train = set(read["train"])
    for split in ("validation", "test"):
        seen = sum(text in train for text in read.get(split, ()))
        if seen:
            notes.append(
                f"{split}: {seen} of {len(read[split])} texts are also in the training data: its scores are too high"
            )
