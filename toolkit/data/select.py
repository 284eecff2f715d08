"""Tables -> the rows of each split that take part, checked before any is tokenized.

1. The columns of texts and targets, found in the training table.
2. Rows without a text or a target are an error, or left out.
3. Without validation rows a part of the training rows is held out; limits, for quick tests.
4. Notes on texts that are in the training data and in another split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.data.columns import (
    find_columns,
    find_texts,
    header_notes,
    likely_labels,
    likely_texts,
    unclear_column,
)
from toolkit.data.read import replacement_notes
from toolkit.data.table import Table
from toolkit.data.targets import Targets, targets_of
from toolkit.data.tokenizer import separator_of
from toolkit.errors import UserError, listing


@dataclass(frozen=True)
class Samples:
    """Rows of a table with their targets."""

    table: Table
    targets: np.ndarray
    """(samples, ...), of `Targets.encode`."""
    hashes: np.ndarray
    """(samples,) int64, of the texts, valid in this process."""

    def __len__(self) -> int:
        return len(self.hashes)

    def select(self, places: np.ndarray) -> Samples:
        """The samples at these ascending places."""
        return Samples(self.table.select(places), self.targets[places], self.hashes[places])


def select_samples(
    settings: Any, tokenizer: Any, tables: Mapping[str, Table]
) -> tuple[dict[str, Samples], Targets, list[str]]:
    """(The samples of each split, the targets, lines for the user.) Finds the columns and the
    targets in the training table, and selects the rows of all splits. Raises UserError naming rows
    without a text or a target, unless `--drop_empty_text` allows them."""
    drop_empty = settings.data.drop_empty_text
    texts, predicted = _find_columns(settings, tables["train"])
    separator = separator_of(tokenizer)
    notes = []
    joined = tables["train"].columns_of(texts[0])
    if len(joined) > 1:
        columns = ", ".join(joined)
        notes.append(f"columns {columns} are one text, with {separator} between them")
    notes.extend(_unread_columns(settings, tables["train"], texts, predicted))
    if settings.data.text_column is None:
        notes.extend(header_notes(tables["train"], texts[0]))
    with_texts = {}
    for split, table in tables.items():
        for note in replacement_notes(table, settings.data):
            notes.append(f"{split}: {note}")
        with_texts[split] = _with_texts(table.read(texts, separator), drop_empty)
    train, _ = with_texts["train"]
    targets_class = targets_of(settings)
    targets = targets_class.find(settings, train, predicted)
    setting = str(targets_class.column_setting)
    what = setting.removesuffix("_column")

    splits = {}
    for split, (table, hashes) in with_texts.items():
        missing = targets.missing(table)
        if split == "test" and missing.all():
            notes.append(
                f"test has no {what}s: it is left out (`toolkit predict` labels it)"
            )
            continue
        for column in predicted:
            table.require(column)
        places = _filled(table, missing, what, predicted, setting, drop_empty)
        table = table.select(places)
        encoded = targets.encode(table)
        splits[split] = Samples(table, encoded, hashes[places])
        dropped = len(tables[split]) - len(table)
        if dropped:
            names = " or ".join([*texts, *predicted])
            notes.append(f"{split}: {dropped} rows with an empty {names} are left out")

    if "validation" not in splits:
        notes.append(_hold_out(splits, targets, settings))
    notes.extend(_limit(splits, settings))
    notes.extend(_overlaps(splits))
    return splits, targets, notes


def data_seed(settings: Any) -> int:
    """The seed that rows are drawn with: `--data_seed`, or the run's seed."""
    if settings.data.data_seed is None:
        return int(settings.training.seed)
    return int(settings.data.data_seed)


def _unread_columns(
    settings: Any, train: Table, texts: tuple[str, ...], predicted: tuple[str, ...]
) -> Iterator[str]:
    """Lines on the other columns, unless the settings name those that are read: another one may
    be the label, or a second text."""
    data = settings.data
    setting = targets_of(settings).column_setting or "text_column"
    if None not in (data.text_column, getattr(data, setting)):
        return
    read = {name for column in (*texts, *predicted) for name in train.columns_of(column)}
    others = [name for name in train.rows.column_names if name not in read]
    if others:
        yield f"not read: column {listing(others)}"
    labels = likely_labels(train, others)
    if getattr(data, "label_column", "") is None and labels:
        doubt = f"column {listing(labels)} may be it, too (--label_column)"
        yield f"the label is read from column {listing(predicted)}: {doubt}"
    seconds = likely_texts(train, [name for name in others if name not in labels])
    if data.text_column is None and getattr(data, "text_pair", "") is None and seconds:
        doubt = f"column {listing(seconds)} has texts, too (--text_column, --text_pair)"
        yield f"the text is read from column {texts[0]}: {doubt}"


def _find_columns(settings: Any, train: Table) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the column of texts, and of second texts if there are any; the columns of targets)."""
    data = settings.data
    targets = targets_of(settings)
    setting = targets.column_setting
    predicted: tuple[str, ...] = ()
    if setting is not None:
        predicted = find_columns(
            train, getattr(data, setting), setting, targets.usual_columns
        )
    texts = find_texts(train, data.text_column, getattr(data, "text_pair", None), predicted)
    read = [name for column in texts for name in train.columns_of(column)]
    if setting is not None and not predicted:
        others = [name for name in train.rows.column_names if name not in read]
        raise unclear_column(train, setting, others, targets.reads_objects)
    both = sorted(set(read).intersection(predicted))
    if both:
        raise UserError(
            f"{train.name}: column {listing(both)} is to be read and predicted: name another "
            f"--text_column or --{setting}"
        )
    return texts, predicted


def _with_texts(table: Table, drop_empty: bool) -> tuple[Table, np.ndarray]:
    """The rows in which no text is blank, and (rows,) hashes of their texts."""
    blank = [np.zeros(0, bool)]
    hashes = [np.zeros(0, np.int64)]
    for texts in table.texts():
        rows = list(zip(*texts, strict=True))
        has_blank = [not all(map(str.strip, row)) for row in rows]
        blank.append(np.array(has_blank))
        hashes.append(np.fromiter(map(hash, rows), np.int64, len(rows)))
    columns = table.text_columns
    places = _filled(
        table, np.concatenate(blank), "text", columns, "text_column", drop_empty
    )
    return table.select(places), np.concatenate(hashes)[places]


def _filled(
    table: Table,
    blank: np.ndarray,
    what: str,
    columns: tuple[str, ...],
    setting: str,
    drop_empty: bool,
) -> np.ndarray:
    """The places of the rows that are not blank. Raises UserError if all are, or, unless they may
    be dropped, some."""
    where = f"{what} in column {' or '.join(map(repr, columns))}"
    if blank.all():
        raise UserError(
            f"{table.name}: every {where} is empty: name another with --{setting}"
        )
    if blank.any() and not drop_empty:
        hint = ""
        if table.name.endswith(".txt") and table.rows.column_names == ["text"]:
            hint = " (or --sample_by paragraph, if they separate texts)"
        rows = table.listing(table.row_numbers[blank])
        raise UserError(
            f"{table.name}: the {where} is empty in {blank.sum()} of {len(blank)} rows (rows "
            f"{rows}): fill them, or pass --drop_empty_text{hint}"
        )
    return np.flatnonzero(~blank)


def _hold_out(splits: dict[str, Samples], targets: Targets, settings: Any) -> str:
    """Moves rows of `train` to `validation`, the same share of each class, and returns a
    note. Raises UserError for too few rows."""
    share = settings.data.validation_split
    seed = data_seed(settings)
    samples = splits["train"]
    # the generator whose numbers stay the same from version to version
    places = np.random.RandomState(seed).permutation(len(samples))
    strata = targets.strata(samples.targets)
    if strata is not None:
        classes = strata[places]
        # a class of one row can only be trained on
        repeats = np.bincount(strata)[classes] > 1
        order = np.argsort(classes[repeats], kind="stable")
        places = places[repeats][order]
    count = max(1, round(len(places) * share))
    if count >= len(places):
        raise UserError(
            f"{samples.table.name}: {len(places)} rows whose class is not theirs alone are too few "
            f"to hold out a part of {share:g} for validation: pass --validation_file; is the "
            "label column right?"
        )
    held_out = np.zeros(len(samples), bool)
    # evenly spaced, which takes of each class its share, to within a row
    held_out[places[np.arange(count) * len(places) // count]] = True
    splits["train"] = samples.select(np.flatnonzero(~held_out))
    splits["validation"] = samples.select(np.flatnonzero(held_out))
    how = f"--validation_split {share:g}, seed {seed}"
    return f"train: {count} of {len(samples)} rows are held out for validation ({how})"


def _limit(splits: dict[str, Samples], settings: Any) -> Iterator[str]:
    """Replaces splits by at most `--max_train_samples` or `--max_eval_samples` of their rows, drawn
    by the seed, in their order, and yields notes."""
    for split, samples in splits.items():
        setting = "max_train_samples" if split == "train" else "max_eval_samples"
        limit = getattr(settings.data, setting)
        if limit is not None and limit < len(samples):
            generator = np.random.default_rng(data_seed(settings))
            drawn = generator.permutation(len(samples))[:limit]
            splits[split] = samples.select(np.sort(drawn))
            yield f"{split}: {limit} of {len(samples)} rows are used (--{setting})"


def _overlaps(splits: Mapping[str, Samples]) -> Iterator[str]:
    """Notes on texts (or pairs) of another split that are also in the training data."""
    trained = np.sort(splits["train"].hashes)
    for split, samples in splits.items():
        if split == "train":
            continue
        places = np.searchsorted(trained, samples.hashes)  # np.isin takes a GB for 10M rows
        seen = trained[places % len(trained)] == samples.hashes
        if not seen.any():
            continue
        rows = listing(row + 1 for row in samples.table.row_numbers[seen])
        yield (
            f"{split}: {seen.sum()} of {len(seen)} texts are also in the training data: its "
            f"scores will be too high (rows {rows})"
        )
