"""Which rows of a table take part, and in which split."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toolkit.data import tokens
from toolkit.data.read import Table, columns_of, find_columns
from toolkit.errors import UserError, listing

USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "article", "文本", "内容", "评论", "正文")
_MOST_GROUPS = 20
_NUMBER = re.compile(r"\s*[-+]?[\d.,]*(e[-+]?\d+)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Targets:
    """What a model learns to predict from a text: `toolkit.data.labels.Labels`, or what a feature brings."""

    column_setting: ClassVar[str | None]
    """The setting that names their column; None where they need none but the text."""
    usual_columns: ClassVar[tuple[str, ...]]
    """Names of columns that are usual for them."""
    split_class: ClassVar[type[tokens.Split]] = tokens.Split
    """What a prepared split with them is loaded as."""

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
        """Looks at these rows of the training table. Raises UserError where they are ambiguous."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> Targets:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in loaded.items()})

    def facts(self) -> dict[str, Any]:
        """What a checkpoint and the run that goes on from it have in common. JSON."""
        raise NotImplementedError

    def describe(self) -> str:
        """A line for the user."""
        raise NotImplementedError

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """(samples, ...): the targets of those rows; zeros that mean nothing where `save` makes them. Raises UserError
        naming a row without one."""
        return np.zeros(len(rows), np.int64)

    def all_missing(self, table: Table) -> bool:
        """Whether a table has the column and nothing in it, as the test splits of many hub data sets."""
        return False

    def trial(self, split: Any) -> tuple[Any, Any] | None:
        """(outputs, what is true) of some samples, which metrics are tried on before training; None: random logits."""
        return None

    def strata(self, encoded: np.ndarray) -> np.ndarray | None:
        """The class of each sample, where there is one, so that a part held back has some of each."""
        return None

    def save(self, folder: Path, rows: Rows, tokenizer: Any) -> list[str]:
        """Writes those of a split beside its tokens: `labels.npy`, and what else its `split_class` reads. Returns
        notes."""
        np.save(folder / "labels.npy", rows.targets)
        return []


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
    """(samples, ...), as `Targets.encode` gives them; empty before they are encoded."""

    def __len__(self) -> int:
        return len(self.numbers)

    def texts(self) -> Iterator[tuple[list[str], list[str] | None]]:
        """Texts, and the second ones where there are any, some rows at a time."""
        for texts, *pairs in text_blocks(self.table, self.columns, self.separator, self.numbers):
            yield texts, pairs[0] if pairs else None

    def with_targets(self, targets: Targets) -> Rows:
        """Raises UserError naming a row without a label."""
        return replace(self, targets=targets.encode(self.table, self.numbers))

    def take(self, places: np.ndarray) -> Rows:
        return replace(
            self,
            numbers=self.numbers[places],
            hashes=self.hashes[places],
            targets=self.targets[places] if len(self.targets) else self.targets,
        )


def text_column(table: Table, name: str | None, excluded: Iterable[str | None] = ()) -> str:
    """The column to read, or several, `title,text`: those that the setting names, one with a usual name, or the only
    one with texts that is not `excluded`. Raises UserError where none or several are possible."""
    columns = find_columns(table, name, USUAL_TEXT, "text_column")
    if not columns:
        others = [other for other in table.rows.column_names if other not in excluded]
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


def pair_column(table: Table, name: str | None, column: str) -> str | None:
    """The column of second texts that the setting names. Raises UserError when it is missing or the first text's."""
    if name is not None and name in columns_of(table, column):
        raise UserError(f"--text_pair {name} is the first text's column too: name another, or leave it out")
    return ",".join(find_columns(table, name, (), "text_pair")) or None


def text_blocks(
    table: Table, columns: Sequence[str], separator: str, rows: np.ndarray | None = None
) -> Iterator[list[list[str]]]:
    """The texts of every row, or of `rows`, some rows at a time: a list for each of `columns`, of which one, `a,b`, may
    be several columns of the table with the separator between them. Raises UserError for one that is missing."""
    parts = [columns_of(table, column) for column in columns]
    for _, cells in table.cells([name for part in parts for name in part], rows):
        each = iter(cells)
        yield [joined_texts(list(itertools.islice(each, len(part))), separator) for part in parts]


def texts_of(table: Table, column: str, separator: str, rows: np.ndarray | None = None) -> Iterator[list[str]]:
    """`text_blocks` of one column."""
    return (texts for (texts,) in text_blocks(table, [column], separator, rows))


def joined_texts(cells: list[list[Any]], separator: str) -> list[str]:
    """The cells of one column or several -> a text for each row."""
    texts = [["" if text is None else str(text) for text in column] for column in cells]
    return texts[0] if len(texts) == 1 else [separator.join(filter(str.strip, row)) for row in zip(*texts, strict=True)]


def seed_of(settings: Any) -> int:
    """What draws rows: `--data_seed`, else the run's seed."""
    return int(settings.training.seed if settings.data.data_seed is None else settings.data.data_seed)


def usable_rows(table: Table, texts: Mapping[str, str], separator: str, drop_empty: bool) -> tuple[Rows, list[str]]:
    """(the rows in which no column of texts is empty, notes); `texts`: columns by the settings that name them. Raises
    UserError naming the rows with empty texts, unless they may be dropped."""
    inputs = tuple(texts[setting] for setting in ("text_column", "text_pair") if setting in texts)
    empty, hashes = [np.zeros((len(texts), 0), bool)], [np.zeros(0, np.int64)]
    for block in text_blocks(table, list(texts.values()), separator):
        empty.append(np.array([[not text.strip() for text in column] for column in block]))
        rows = zip(*block[: len(inputs)], strict=True)
        hashes.append(np.fromiter(map(hash, rows), np.int64, len(block[0])))
    flags = np.concatenate(empty, axis=1)  # (columns, rows)
    for (setting, column), blank in zip(texts.items(), flags, strict=True):
        what = f"{setting.removesuffix('_column').replace('_pair', '')} in column {column!r}"  # the text, or the title
        if blank.all():
            raise UserError(f"{table.name}: every {what} is empty: name another with --{setting}")
        if blank.any() and not drop_empty:
            raise UserError(
                f"{table.name}: the {what} is empty in {blank.sum()} of {len(blank)} rows (rows "
                f"{listing(np.flatnonzero(blank) + 1)}): fill them, or pass --drop_empty_text"
                + " (or --sample_by paragraph, where they separate texts)"
                * table.name.endswith(".txt")
            )
    numbers = np.flatnonzero(~flags.any(axis=0))
    if not len(numbers):
        raise UserError(f"{table.name}: in every row one of {listing(texts.values())} is empty")
    dropped = flags.shape[1] - len(numbers)
    notes = [f"{table.name}: {dropped} rows with an empty {' or '.join(texts.values())} are left out"] * (dropped > 0)
    return Rows(table, inputs, separator, numbers, np.concatenate(hashes)[numbers], np.zeros(0)), notes


def long_enough(rows: Rows, min_length: int, tokenizer: Any) -> tuple[Rows, str]:
    """(those with at least `min_length` tokens, a note). Raises UserError when there are none."""
    name = rows.table.name
    blocks = tokens.encoded(tokenizer, rows.texts(), min_length, len(rows), f"lengths of {name}")
    places = np.flatnonzero(np.concatenate([block.lengths for block in blocks]) >= min_length)
    if not len(places):
        raise UserError(f"{name}: no text has {min_length} tokens: lower --min_length, or leave it out")
    shorter = f"{len(rows) - len(places)} of {len(rows)} texts have fewer than {min_length} tokens"
    return rows.take(places), f"{name}: {shorter} and are left out (--min_length)"


def sampled(rows: Rows, split: str, most: int | None, seed: int) -> tuple[Rows, list[str]]:
    """(at most so many rows, drawn by the seed, in their order; notes)."""
    if most is None or most >= len(rows):
        return rows, []
    setting = "max_train_samples" if split == "train" else "max_eval_samples"
    places = np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])
    return rows.take(places), [f"{split}: {most} of {len(rows)} rows are used (--{setting})"]


def hold_back(rows: Rows, targets: Targets, share: float, seed: int) -> tuple[dict[str, Rows], list[str]]:
    """({"train": rows, "validation": rows}, notes): a share of each class for validation, where there are classes.
    Raises UserError where the rows are too few."""
    name, places, notes = rows.table.name, np.arange(len(rows)), list[str]()
    strata = targets.strata(rows.targets)
    if strata is not None:
        single = np.bincount(strata)[strata] < 2  # a class of one row can only be trained on
        places, strata = places[~single], strata[~single]
    count = max(1, round(len(places) * share))
    if count >= len(places):
        raise UserError(
            f"{name}: {len(rows)} rows are too few to hold a part of {share:g} back for validation: give "
            "--validation_file, or another --validation_split"
        )
    if strata is not None and min(count, len(places) - count) < len(np.unique(strata)):
        strata = None
        notes.append(f"{name}: too few rows to hold some of each class back")
    validation = np.zeros(len(rows), bool)
    validation[places[_drawn(strata, len(places), count, seed)]] = True
    held_back = f"{count} of {len(rows)} rows are held back for validation"
    notes.append(f"{name}: {held_back} (--validation_split {share:g}, seed {seed})")
    parts = {"train": ~validation, "validation": validation}
    return {split: rows.take(np.flatnonzero(part)) for split, part in parts.items()}, notes


def _drawn(strata: np.ndarray | None, count: int, held_back: int, seed: int) -> np.ndarray:
    """The places of some of `count` rows: those that scikit-learn's StratifiedShuffleSplit (ShuffleSplit without
    strata) draws with this seed, in a sixth of its memory: its lists of Python integers take 0.65 GB more for ten
    million rows."""
    random = np.random.RandomState(seed)
    if strata is None:
        return random.permutation(count)[:held_back]
    counts = np.bincount(strata)
    counts = counts[counts > 0]
    train = _proportional(counts, count - held_back, random)
    validation = _proportional(counts - train, held_back, random)
    classes = np.split(np.argsort(strata, kind="stable"), np.cumsum(counts)[:-1])
    return np.concatenate([
        rows[random.permutation(len(rows))[before : before + size]]
        for rows, before, size in zip(classes, train, validation, strict=True)
    ])  # fmt: skip


def _proportional(counts: np.ndarray, draws: int, random: np.random.RandomState) -> np.ndarray:
    """How many of so many draws each class gets, by its share of `counts`: rounded down, then one more for the largest
    remainders (the largest remainder method), ties drawn at random as scikit-learn does."""
    shares = counts / counts.sum() * draws
    sizes = np.floor(shares)
    missing, remainders = int(draws - sizes.sum()), shares - sizes
    for remainder in np.unique(remainders)[::-1]:
        if not missing:
            break
        ties = np.flatnonzero(remainders == remainder)
        sizes[random.choice(ties, size=min(len(ties), missing), replace=False)] += 1
        missing -= min(len(ties), missing)
    return sizes.astype(int)


def overlaps(rows_of: dict[str, Rows]) -> Iterator[str]:
    """Notes on texts (or pairs of them) of another split that are also in the training data."""
    train = np.sort(rows_of["train"].hashes)
    for split in [split for split in ("validation", "test") if split in rows_of]:
        hashes = rows_of[split].hashes
        seen = train[np.searchsorted(train, hashes) % len(train)] == hashes
        if seen.any():
            yield (
                f"{split}: {seen.sum()} of {len(hashes)} texts are also in the training data: its scores will be too "
                f"high (rows {listing(rows_of[split].numbers[seen] + 1)})"
            )


def sources(rows: Rows, inputs: Sequence[str]) -> Iterator[list[dict[str, str]]]:
    """Of each row the cells of the columns that group rows (2 to 20 different values), some rows at a time; nothing
    where there are none. `inputs`: columns that the model reads or learns, which do not count."""
    table, most = rows.table.rows.with_format(None), min(_MOST_GROUPS, len(rows) // 2)
    names = [name for name in table.column_names if name not in inputs]
    names = [name for name in names if len({str(cell) for cell in table[:1000][name]}) <= most]  # of texts no more
    values: dict[str, set[str]] = {name: set() for name in names}
    for _, cells in rows.table.cells(names, rows.numbers):
        for name, column in zip(names, cells, strict=True):
            if len(values[name]) <= most:
                values[name].update(map(str, column))
    names = [name for name in names if 1 < len(values[name]) <= most]
    for _, cells in rows.table.cells(names, rows.numbers):
        yield [dict(zip(names, map(str, row), strict=True)) for row in zip(*cells, strict=True)]
