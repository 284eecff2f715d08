"""Which rows of the tables are used, and in which split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toolkit.data import tokens
from toolkit.data.table import Table, pair_column, text_blocks
from toolkit.errors import UserError, listing
from toolkit.utils.features import hooks

_MAX_GROUPS = 20


@dataclass(frozen=True)
class Targets:
    """What a model learns to predict from a text: `toolkit.data.labels.Labels`, or a feature's subclass."""

    column_setting: ClassVar[str | None]
    """The setting that names their column; None where they need only the text."""
    usual_columns: ClassVar[tuple[str, ...]]
    """Common names of that column."""
    split_class: ClassVar[type[tokens.Split]] = tokens.Split
    """The class that a prepared split is loaded as."""

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        """Raises UserError for a tokenizer that cannot encode them."""

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        """The settings that prepared data depend on. JSON."""
        raise NotImplementedError

    @classmethod
    def text_columns(cls, settings: Any, table: Table, text_column: str) -> dict[str, str]:
        """Setting -> column of further texts; rows where one is empty are not used."""
        return {}

    @classmethod
    def find(cls, settings: Any, table: Table, text_column: str, rows: np.ndarray) -> Targets:
        """Infers the targets from these rows of the training table. Raises UserError where they are ambiguous."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> Targets:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in loaded.items()})

    def facts(self) -> dict[str, Any]:
        """What must be equal in a checkpoint and the run that resumes from it. JSON."""
        raise NotImplementedError

    def source(self) -> dict[str, Any]:
        """Where the file has them, for the run's config.json. JSON."""
        return {}

    def describe(self) -> str:
        """A line for the user."""
        raise NotImplementedError

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """(samples, ...): the targets of those rows; zeros if `save` computes them. Raises UserError naming a row."""
        return np.zeros(len(rows), np.int64)

    def all_missing(self, table: Table) -> bool:
        """Whether the column is there but empty, as in the test splits of many hub data sets."""
        return False

    def trial(self, split: Any) -> tuple[Any, Any] | None:
        """(outputs, truth) of some samples, to try metrics on before training; None: random logits."""

    def strata(self, encoded: np.ndarray) -> np.ndarray | None:
        """(samples,) the class of each sample, for a stratified validation split; None where there are no classes."""

    def save(self, folder: Path, rows: Rows, tokenizer: Any) -> list[str]:
        """Writes a split's targets next to its tokens: `labels.npy`, and other files that its `split_class` reads.
        Returns notes."""
        np.save(folder / "labels.npy", rows.targets)
        return []


@dataclass(frozen=True)
class Rows:
    """Selected rows of a table."""

    table: Table
    columns: tuple[str, ...]
    """The text column, or several as `title,text`; and the column of second texts, where there is one."""
    separator: str
    """Between the texts of several columns."""
    numbers: np.ndarray
    """(samples,) int64, row numbers in the table, from 0, ascending."""
    hashes: np.ndarray
    """(samples,) int64 of the texts, valid in this process."""
    targets: np.ndarray
    """(samples, ...), as `Targets.encode` gives them; empty before they are encoded."""

    def __len__(self) -> int:
        return len(self.numbers)

    def texts(self) -> Iterator[tuple[list[str], list[str] | None]]:
        """Batches of (texts, second texts or None)."""
        for texts, *pairs in text_blocks(self.table, self.columns, self.separator, self.numbers):
            yield texts, pairs[0] if pairs else None

    def encode_targets(self, targets: Targets) -> Rows:
        """Raises UserError naming a row without a label."""
        return replace(self, targets=targets.encode(self.table, self.numbers))

    def take(self, places: np.ndarray) -> Rows:
        return replace(
            self,
            numbers=self.numbers[places],
            hashes=self.hashes[places],
            targets=self.targets[places] if len(self.targets) else self.targets,
        )


def data_seed(settings: Any) -> int:
    """The seed that rows are drawn with: `--data_seed`, or the run's seed."""
    return int(settings.training.seed if settings.data.data_seed is None else settings.data.data_seed)


def select_rows(
    settings: Any,
    tokenizer: Any,
    targets_class: type[Targets],
    facts: Mapping[str, Any],
    tables: Mapping[str, Table],
    column: str,
) -> tuple[Targets, dict[str, Rows], list[str]]:
    """(the targets, the rows of each split, notes); `column`: of the texts. Raises UserError for unusable rows."""
    data, train, seed, notes = settings.data, tables["train"], data_seed(settings), list[str]()
    pair = pair_column(train, getattr(data, "text_pair", None), column)
    texts = {"text_column": column} | ({"text_pair": pair} if pair else {})
    texts |= targets_class.text_columns(settings, train, column)

    def with_texts(table: Table) -> Rows:
        rows, more = drop_empty(table, texts, tokens.separator_of(tokenizer), data.drop_empty_text)
        notes.extend(more)
        if data.min_length is not None:
            rows, note = drop_short(rows, data.min_length, tokenizer)
            notes.append(note)
        return rows

    rows = with_texts(train)
    targets = targets_class.find(settings, train, column, rows.numbers)
    splits = {"train": rows.encode_targets(targets)}
    for select in hooks("select_rows", settings):
        changed, more = select(settings, facts, splits["train"], targets)
        splits |= changed
        notes += more
    others = {split: table for split, table in tables.items() if split not in splits}
    if "validation" in splits and others:
        notes.append(f"the other splits of the data are not used: {', '.join(others)}")
        others = {}
    for split, table in others.items():
        if split == "test" and targets.all_missing(table):
            notes.append(f"{table.name} has no labels: it is left out (`toolkit predict` labels it)")
        else:
            splits[split] = with_texts(table).encode_targets(targets)
    if "validation" not in splits:
        parts, more = hold_back(splits.pop("train"), targets, data.validation_split, seed)
        splits = {**parts, **splits}
        notes += more
    for split, rows in splits.items():
        limit = data.max_train_samples if split == "train" else data.max_eval_samples
        splits[split], more = limit_rows(rows, split, limit, seed)
        notes += more
    return targets, splits, [*notes, *find_overlaps(splits)]


def drop_empty(table: Table, texts: Mapping[str, str], separator: str, allowed: bool) -> tuple[Rows, list[str]]:
    """(the rows in which no column of texts is empty, notes); `texts`: columns by the settings that name them. Raises
    UserError naming the rows with empty texts, unless they are `allowed`."""
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
        if blank.any() and not allowed:
            hint = " (or --sample_by paragraph, where they separate texts)" * table.name.endswith(".txt")
            raise UserError(
                f"{table.name}: the {what} is empty in {blank.sum()} of {len(blank)} rows (rows "
                f"{table.listing(np.flatnonzero(blank))}): fill them, or pass --drop_empty_text{hint}"
            )
    numbers = np.flatnonzero(~flags.any(axis=0))
    if not len(numbers):
        raise UserError(f"{table.name}: in every row one of {listing(texts.values())} is empty")
    dropped = flags.shape[1] - len(numbers)
    notes = [f"{table.name}: {dropped} rows with an empty {' or '.join(texts.values())} are left out"] * (dropped > 0)
    return Rows(table, inputs, separator, numbers, np.concatenate(hashes)[numbers], np.zeros(0)), notes


def drop_short(rows: Rows, min_length: int, tokenizer: Any) -> tuple[Rows, str]:
    """(the rows with at least `min_length` tokens, a note). Raises UserError when there are none."""
    name = rows.table.name
    blocks = tokens.encode_blocks(tokenizer, rows.texts(), min_length, len(rows), f"lengths of {name}")
    places = np.flatnonzero(np.concatenate([block.lengths for block in blocks]) >= min_length)
    if not len(places):
        raise UserError(f"{name}: no text has {min_length} tokens: lower --min_length, or leave it out")
    shorter = f"{len(rows) - len(places)} of {len(rows)} texts have fewer than {min_length} tokens"
    return rows.take(places), f"{name}: {shorter} and are left out (--min_length)"


def limit_rows(rows: Rows, split: str, limit: int | None, seed: int) -> tuple[Rows, list[str]]:
    """(at most `limit` rows, drawn by the seed, in their order; notes)."""
    if limit is None or limit >= len(rows):
        return rows, []
    setting = "max_train_samples" if split == "train" else "max_eval_samples"
    places = np.sort(np.random.default_rng(seed).permutation(len(rows))[:limit])
    return rows.take(places), [f"{split}: {limit} of {len(rows)} rows are used (--{setting})"]


def hold_back(rows: Rows, targets: Targets, share: float, seed: int) -> tuple[dict[str, Rows], list[str]]:
    """({"train": rows, "validation": rows}, notes), stratified by class. Raises UserError for too few rows."""
    name, places, notes = rows.table.name, np.arange(len(rows)), list[str]()
    strata = targets.strata(rows.targets)
    if strata is not None:
        single = np.bincount(strata)[strata] < 2  # a class of one row can only be trained on
        places, strata = places[~single], strata[~single]
        if not len(places):
            raise UserError(f"{name}: each class has one row: is --{targets.column_setting} right?")
    count = max(1, round(len(places) * share))
    if count >= len(places):
        raise UserError(
            f"{name}: {len(rows)} rows are too few to hold out a part of {share:g} for validation: pass "
            "--validation_file, or another --validation_split"
        )
    if strata is not None and min(count, len(places) - count) < len(np.unique(strata)):
        strata = None
        notes.append(f"{name}: too few rows to hold out some of each class")
    validation = np.zeros(len(rows), bool)
    validation[places[_stratified_sample(strata, len(places), count, seed)]] = True
    held_back = f"{count} of {len(rows)} rows are held back for validation"
    notes.append(f"{name}: {held_back} (--validation_split {share:g}, seed {seed})")
    parts = {"train": ~validation, "validation": validation}
    return {split: rows.take(np.flatnonzero(part)) for split, part in parts.items()}, notes


def _stratified_sample(strata: np.ndarray | None, count: int, held_back: int, seed: int) -> np.ndarray:
    """Indices of `held_back` of `count` rows: those that scikit-learn's StratifiedShuffleSplit (ShuffleSplit without
    strata) draws with this seed, in a sixth of its memory: 0.65 GB less for ten million rows."""
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
    """The draws of each class by the largest remainder method, ties drawn at random as in scikit-learn."""
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


def find_overlaps(splits: dict[str, Rows]) -> Iterator[str]:
    """Notes on texts (or pairs) of another split that are also in the training data."""
    train = np.sort(splits["train"].hashes)
    for split in [split for split in ("validation", "test") if split in splits]:
        hashes = splits[split].hashes
        seen = train[np.searchsorted(train, hashes) % len(train)] == hashes
        if seen.any():
            yield (
                f"{split}: {seen.sum()} of {len(hashes)} texts are also in the training data: its scores will be too "
                f"high (rows {splits[split].table.listing(splits[split].numbers[seen])})"
            )


def group_cells(rows: Rows, inputs: Sequence[str]) -> Iterator[dict[str, str]]:
    """{column: cell} of each row, of the columns with 2 to 20 distinct values, by which metrics are grouped
    in reports. `inputs`: columns that the model reads or learns, which are left out."""
    table, limit = rows.table.rows.with_format(None), min(_MAX_GROUPS, len(rows) // 2)
    names = [name for name in table.column_names if name not in inputs]
    names = [name for name in names if len({str(cell) for cell in table[:1000][name]}) <= limit]  # quick, for texts
    values: dict[str, set[str]] = {name: set() for name in names}
    for _, cells in rows.table.cells(names, rows.numbers):
        for name, column in zip(names, cells, strict=True):
            if len(values[name]) <= limit:
                values[name].update(map(str, column))
    names = [name for name in names if 1 < len(values[name]) <= limit]
    for _, cells in rows.table.cells(names, rows.numbers):
        yield from (dict(zip(names, map(str, row), strict=True)) for row in zip(*cells, strict=True))
