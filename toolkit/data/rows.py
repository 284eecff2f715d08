"""Which rows of a table take part, and on which side."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toolkit.data import tokens
from toolkit.data.read import Table, columns_of, find_columns
from toolkit.errors import UserError, listing

USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "article", "文本", "内容", "评论", "正文")
_MOST_VALUES = 20
_NUMBER = re.compile(r"\s*[-+]?[\d.,]*(e[-+]?\d+)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Targets:
    """What is learned from a text: `toolkit.data.labels.Labels`, or what a feature brings."""

    column_setting: ClassVar[str]
    """The setting that names their column."""
    usual_columns: ClassVar[tuple[str, ...]]
    """Names by which their column is known."""

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        """Raises UserError for a tokenizer that cannot write them."""

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        """The settings that prepared data depend on. JSON."""
        raise NotImplementedError

    @classmethod
    def text_columns(cls, settings: Any, table: Table, text_column: str) -> dict[str, str]:
        """Setting -> column of further texts that must not be empty in a row that takes part."""
        return {}

    @classmethod
    def find(cls, settings: Any, table: Table, text_column: str, rows: np.ndarray) -> Targets:
        """Looks at these rows of the training table. Raises UserError where it cannot tell what is meant."""
        raise NotImplementedError

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

    def save(self, folder: Path, rows: Rows, tokenizer: Any, notes: list[str]) -> None:
        """Keeps those of a split with its tokens: `labels.npy` and what else there is."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rows:
    """Rows of a table that take part."""

    table: Table
    columns: tuple[str, ...]
    """The text's, or several, `title,text`; and the second text's, where there is one."""
    separator: str
    """Between the texts of several columns."""
    numbers: np.ndarray
    """(samples,) int64, their places in the table, from 0; they ascend."""
    hashes: np.ndarray
    """(samples,) int64: texts that are equal have equal ones, in this process."""
    targets: np.ndarray
    """(samples, ...), as `Targets.encode` gives them; empty before they are known."""

    def __len__(self) -> int:
        return len(self.numbers)

    def texts(self) -> Iterator[tuple[list[str], list[str] | None]]:
        """Texts, and the second ones where there are any, some rows at a time."""
        read = [texts_of(self.table, column, self.separator, self.numbers) for column in self.columns]
        for texts in zip(*read, strict=True):
            yield texts if len(texts) == 2 else (texts[0], None)

    def take(self, places: np.ndarray) -> Rows:
        return replace(
            self,
            numbers=self.numbers[places],
            hashes=self.hashes[places],
            targets=self.targets[places] if len(self.targets) else self.targets,
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


def texts_of(
    table: Table, column: str, separator: str, rows: np.ndarray | None = None, what: str = "text"
) -> Iterator[list[str]]:
    """The text of every row, or of `rows`, some at a time; of several columns, with the separator between them. Raises
    UserError for one that is missing."""
    for _, cells in table.cells(columns_of(table, column), what, rows):
        yield joined_texts(cells, separator)


def joined_texts(cells: list[list[Any]], separator: str) -> list[str]:
    """The cells of one column or several -> a text for each row."""
    texts = [["" if text is None else str(text) for text in column] for column in cells]
    return texts[0] if len(texts) == 1 else [separator.join(filter(str.strip, row)) for row in zip(*texts, strict=True)]


def usable_rows(
    table: Table, columns: dict[str, str | None], separator: str, drop_empty: bool, notes: list[str]
) -> Rows:
    """The rows whose text is not empty, nor what else they must have: `columns` by the settings that name them, the
    text's first. Raises UserError naming the others."""
    there = {setting: column for setting, column in columns.items() if column is not None}
    whats = ["title" if setting == "title_column" else "text" for setting in there]
    blocks = [
        texts_of(table, column, separator, None, what) for column, what in zip(there.values(), whats, strict=True)
    ]
    empty, hashes = [np.zeros((len(there), 0), bool)], [np.zeros(0, np.int64)]
    for block in zip(*blocks, strict=True):
        empty.append(np.array([[not text.strip() for text in texts] for texts in block]))
        read = block[: 2 - (columns.get("text_pair") is None)]
        hashes.append(np.fromiter(map(hash, zip(*read, strict=True)), np.int64, len(block[0])))
    flags = np.concatenate(empty, axis=1)  # (columns, rows)
    for (setting, column), what, blank in zip(there.items(), whats, flags, strict=True):
        if blank.all():
            raise UserError(f"{table.name}: every {what} in column {column!r} is empty: name another with --{setting}")
        if blank.any() and not drop_empty:
            raise UserError(
                f"{table.name}: the {what} in column {column!r} is empty in {blank.sum()} of {len(blank)} rows (rows "
                f"{listing(np.flatnonzero(blank) + 1)}): fill them, or pass --drop_empty_text"
            )
    full = ~flags.any(axis=0)
    if not full.any():
        raise UserError(f"{table.name}: in every row one of {listing(there.values())} is empty")
    if not full.all():
        kind = "text or title" if columns.get("title_column") else "text"
        notes.append(f"{table.name}: {int((~full).sum())} rows with an empty {kind} are left out")
    read_columns = tuple(there[setting] for setting in ("text_column", "text_pair") if setting in there)
    numbers = np.flatnonzero(full)
    return Rows(table, read_columns, separator, numbers, np.concatenate(hashes)[numbers], np.zeros(0))


def long_enough(rows: Rows, min_length: int, tokenizer: Any, notes: list[str]) -> Rows:
    """Those with at least `min_length` tokens. Raises UserError when there are none."""
    name = rows.table.name
    blocks = tokens.encoded(tokenizer, rows.texts(), min_length, len(rows), f"lengths of {name}")
    places = np.flatnonzero(np.concatenate([block.lengths for block in blocks]) >= min_length)
    if not len(places):
        raise UserError(f"{name}: no text has {min_length} tokens: lower --min_length, or leave it out")
    fewer = f"fewer than {min_length} tokens and are left out (--min_length)"
    notes.append(f"{name}: {len(rows) - len(places)} of {len(rows)} texts have {fewer}")
    return rows.take(places)


def sampled(rows: Rows, split: str, most: int | None, seed: int, notes: list[str]) -> Rows:
    """At most so many rows, chosen by the seed, in their order."""
    if most is None or most >= len(rows):
        return rows
    setting = "max_train_samples" if split == "train" else "max_eval_samples"
    notes.append(f"{split}: {most} of {len(rows)} rows are used (--{setting})")
    return rows.take(np.sort(np.random.default_rng(seed).permutation(len(rows))[:most]))


def hold_back(rows: Rows, targets: Targets, share: float, seed: int, notes: list[str]) -> dict[str, Rows]:
    """Divides training rows into `train` and `validation`, by class where there are classes."""
    table = rows.table
    validation = _held_back(rows, targets.strata(rows.targets), share, seed, notes)
    held = int(validation.sum())
    notes.append(
        f"{table.name}: {held} of {len(rows)} rows are held back for validation "
        f"(--validation_split {share:g}, seed {seed})"
    )
    return {
        "train": rows.take(np.flatnonzero(~validation)),
        "validation": rows.take(np.flatnonzero(validation)),
    }


def _held_back(rows: Rows, classes: np.ndarray | None, share: float, seed: int, notes: list[str]) -> np.ndarray:
    """(rows,) whether each is for validation. Raises UserError where they are too few."""
    name, places, strata = rows.table.name, np.arange(len(rows)), classes
    if classes is not None:
        alone = np.bincount(classes)[classes] < 2  # a class of one row can only be trained on
        places, strata = places[~alone], classes[~alone]
    held = max(1, round(len(places) * share))
    if held >= len(places):
        raise UserError(
            f"{name}: {len(rows)} rows are too few to hold a part of {share:g} back for validation: give "
            "--validation_file, or another --validation_split"
        )
    if strata is not None and min(held, len(places) - held) < len(np.unique(strata)):
        strata = None
        notes.append(f"{name}: too few rows to hold some of each class back")
    validation = np.zeros(len(rows), bool)
    validation[places[_drawn(strata, len(places), held, seed)]] = True
    return validation


def _drawn(strata: np.ndarray | None, count: int, held: int, seed: int) -> np.ndarray:
    """The places of `held` of `count` rows: those that scikit-learn's `train_test_split` takes, without its list of all
    rows, which takes 40 bytes for each."""
    random = np.random.RandomState(seed)
    if strata is None:
        return random.permutation(count)[:held]
    counts = np.bincount(strata)
    counts = counts[counts > 0]
    kept = _apportioned(counts, count - held, random)
    taken = _apportioned(counts - kept, held, random)
    classes = np.split(np.argsort(strata, kind="stable"), np.cumsum(counts)[:-1])
    return np.concatenate([
        rows[random.permutation(len(rows))[before : before + some]]
        for rows, before, some in zip(classes, kept, taken, strict=True)
    ])  # fmt: skip


def _apportioned(counts: np.ndarray, draws: int, random: np.random.RandomState) -> np.ndarray:
    """How many of each class are among so many draws: their share, the largest remainders rounded up, ties at random;
    as scikit-learn's `_approximate_mode`, whose draws from `random` count too."""
    share = counts / counts.sum() * draws
    found = np.floor(share)
    missing, remainder = int(draws - found.sum()), share - found
    for value in np.unique(remainder)[::-1] if missing > 0 else ():
        ties = np.flatnonzero(remainder == value)
        found[random.choice(ties, size=min(len(ties), missing), replace=False)] += 1
        missing -= min(len(ties), missing)
        if not missing:
            break
    return found.astype(int)


def note_overlap(chosen: dict[str, Rows], notes: list[str]) -> None:
    """Texts (or pairs of them) of another split that are also in the training data."""
    train = np.sort(chosen["train"].hashes)
    for split in [split for split in ("validation", "test") if split in chosen]:
        hashes = chosen[split].hashes
        seen = train[np.searchsorted(train, hashes) % len(train)] == hashes
        if seen.any():
            rows = listing(chosen[split].numbers[seen] + 1)
            notes.append(
                f"{split}: {seen.sum()} of {len(hashes)} texts are also in the training data: its scores will be too "
                f"high (rows {rows})"
            )


def sources(rows: Rows, learned: Sequence[str]) -> list[str]:
    """Of each row the cells of the columns that group rows (2 to 20 different values), as JSON; for reports."""
    table, groups = rows.table.rows.with_format(None), {}
    most = min(_MOST_VALUES, len(rows) // 2)
    for name in table.column_names:
        # a first look: a column of texts must not be read whole for this
        if name not in learned and len({str(cell) for cell in table[:1000][name]}) <= most:
            cells = [str(cell) for _, (some,) in rows.table.cells((name,), "source", rows.numbers) for cell in some]
            if 1 < len(set(cells)) <= most:
                groups[name] = cells
    lines = ({name: cells[place] for name, cells in groups.items()} for place in range(len(rows)))
    return [json.dumps(line, ensure_ascii=False) for line in lines]
