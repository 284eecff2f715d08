"""Settings -> tables -> a cached folder of tokens and targets -> the data of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from toolkit import launch
from toolkit.config import flat
from toolkit.data import balance, tokens
from toolkit.data.labels import Labels
from toolkit.data.read import read_tables
from toolkit.data.table import Table
from toolkit.data.targets import Targets, targets_of
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.utils.cache import cached_folder, digest_of_text
from toolkit.utils.features import features

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAYOUT = 3  # increase when the content of a prepared folder changes
WARN_UNKNOWN = 0.05
"""A share of all tokens; “ and ” are unknown to bert-base-chinese."""
MAX_UNKNOWN = 0.5
_MAX_GROUPS = 20
_FILES = ("train_file", "validation_file", "test_file", "label_names_file", "model_name_or_path")
"""Settings that may differ between machines: their content is compared."""
_OPTIONAL = ("text_pair", "min_length", "max_train_samples", "max_eval_samples")


@dataclass(frozen=True)
class Data:
    """The data of a run; the splits' arrays are memory-mapped from `folder`."""

    folder: Path
    digest: str
    text_column: str
    """Several are separated by commas."""
    text_pair: str | None
    """The column of second texts."""
    max_length: int
    notes: tuple[str, ...]
    """Lines for the user: sizes, truncated texts, overlaps."""
    targets: Targets
    train: Split
    validation: Split
    test: Split | None
    file_digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the content of each split's file."""
    pos_weight: torch.Tensor | None = None
    """(classes,) float32, on the device: the weight of positive labels in the loss
    (--pos_weight)."""
    advice: str = ""
    """A line if the classes are imbalanced and no setting compensates for it."""

    @property
    def labels(self) -> Labels:
        """The targets, if these are labels."""
        return cast(Labels, self.targets)

    @property
    def splits(self) -> dict[str, Split]:
        splits = (self.train, self.validation, self.test)
        return {split.name: split for split in splits if split is not None}

    def with_collator(self, collator: Any) -> Data:
        """The same with this collator (as in `Split.collator`) for every split."""
        splits: Any = {}
        for name, split in self.splits.items():
            splits[name] = replace(split, collator=collator)
        return replace(self, **splits)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(split) for name, split in self.splits.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """The task, which must be equal in a checkpoint and the run that resumes from it. JSON."""
        facts = self.targets.facts()
        if self.text_pair:
            facts["text_pair"] = self.text_pair
        return facts


def prepare_data(
    settings: Any, tokenizer: Any, model_config: Any, accelerator: Accelerator | None = None
) -> Data:
    """Tokenizes the texts and encodes their targets, in one process per machine; all processes load
    them. Raises UserError for every fault of the input, and when machines have different data."""
    several = accelerator if accelerator is not None and accelerator.num_processes > 1 else None
    if several is not None:
        _require_equal_settings(several, settings)
    workers = settings.data.preprocessing_num_workers
    if workers:  # the tokenizer reads it at its first call
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    targets_class = targets_of(settings)
    targets_class.check(settings, tokenizer)
    tokens.refuse_foreign_tokenizer(tokenizer, model_config)
    tables = read_tables(settings.data, targets_class.column_setting is not None)
    facts = _facts(settings, tokenizer, model_config, tables)
    if several is not None:  # before an hour of work on different data
        launch.require_equal(several, "the data", facts)
    digest = digest_of_text(json.dumps(facts, sort_keys=True))
    source = ", ".join(table.name for table in tables.values())
    with cached_folder("tokens", digest, several, source) as (folder, draft):
        if draft:
            _Preparation(settings, tokenizer, facts, tables).write(draft)
    device = torch.device("cpu") if accelerator is None else accelerator.device
    data = _load(settings, folder, model_config, tables)
    return _weighed(settings, data, device)


def _require_equal_settings(accelerator: Accelerator, settings: Any) -> None:
    values = flat(settings)
    for name in _FILES:
        values.pop(name, None)
    if Path(str(settings.data.dataset_name)).is_dir():
        values.pop("dataset_name")
    launch.require_equal(accelerator, "the settings", values)


def _facts(
    settings: Any, tokenizer: Any, model_config: Any, tables: Mapping[str, Table]
) -> dict[str, Any]:
    """What the prepared data depend on; the seed only if rows are drawn. JSON."""
    data = settings.data
    pair = getattr(data, "text_pair", None) is not None
    facts = {"layout": _LAYOUT, **targets_of(settings).data_facts(settings)}
    facts["max_length"] = tokens.choose_max_length(data.max_length, tokenizer, model_config, pair)
    for name in ("text_column", "drop_empty_text", "validation_split"):
        facts[name] = getattr(data, name)
    facts |= {name: getattr(data, name) for name in _OPTIONAL if getattr(data, name, None)}
    if pair and "token_type_ids" not in tokenizer.model_input_names:
        facts["token_types"] = False
    if "," in (data.text_column or ""):
        facts["separator"] = tokens.separator_of(tokenizer)
    if "validation" not in tables or data.max_train_samples or data.max_eval_samples:
        facts["seed"] = data_seed(settings)
    for split, table in tables.items():
        facts[f"the content of the {split} data"] = table.digest
    facts["the tokenizer"] = tokens.fingerprint(tokenizer)
    return facts


def _load(settings: Any, folder: Path, model_config: Any, tables: Mapping[str, Table]) -> Data:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    targets_class = targets_of(settings)
    splits: dict[str, Any] = dict.fromkeys(("train", "validation", "test"))
    for name in meta["splits"]:
        splits[name] = tokens.load_split(folder, name, model_config, targets_class.split_class)
    notes = meta["notes"]
    for split, name in meta["files"].items():
        # the same content may have been tokenized under another name
        notes = [note.replace(name, tables[split].name) for note in notes]
    text_pair = getattr(settings.data, "text_pair", None)
    if text_pair and not tokens.has_token_types(model_config):
        notes.append("this model has one token type: only a separator divides the texts of a pair")
    return Data(
        folder=folder,
        digest=folder.name,
        text_column=meta["text_column"],
        text_pair=text_pair,
        max_length=meta["max_length"],
        notes=tuple(notes),
        targets=targets_class.from_json(meta["targets"]),
        file_digests={split: table.digest for split, table in tables.items()},
        **splits,
    )


def finish_data(settings: Any, data: Data, tokenizer: Any, accelerator: Accelerator) -> Data:
    """The data with the collator of their targets, and what features change (`Feature.data`)."""
    data = data.with_collator(type(data.targets).collator(settings))
    for feature in features():
        data = feature.data(settings, data, tokenizer, accelerator)
    return data


def _weighed(settings: Any, data: Data, device: torch.device) -> Data:
    """With the weights and the sampling of classes that the settings ask for."""
    objective = getattr(settings, "objective", None)  # a user's recipe may lack this section
    if objective is None or not isinstance(data.targets, Labels):
        return data
    balanced = balance.weigh_classes(data.splits, data.targets, objective)
    pos_weight = None
    if balanced.pos_weight is not None:
        pos_weight = torch.from_numpy(balanced.pos_weight).to(device)
    splits: dict[str, Any] = balanced.splits
    notes = (*data.notes, *balanced.notes)
    return replace(data, **splits, pos_weight=pos_weight, notes=notes, advice=balanced.advice)


_Samples = dict[str, tuple[Table, np.ndarray]]
"""Split -> its rows, and their encoded targets."""


@dataclass(frozen=True)
class _Preparation:
    """The data of a run, from tables to a folder of tokens."""

    settings: Any
    tokenizer: Any
    facts: Mapping[str, Any]
    tables: Mapping[str, Table]
    notes: list[str] = field(default_factory=list)
    hashes: dict[str, np.ndarray] = field(default_factory=dict)
    """Name of a table -> (rows,) int64 of its texts, valid in this process."""

    def write(self, folder: Path) -> None:
        """Selects and checks the rows of every split before tokenizing any; then writes them all to
        `folder`."""
        texts = self._find_texts()
        train = self._with_texts(self.tables["train"], texts)
        targets = targets_of(self.settings).find(self.settings, train, texts["text_column"])
        samples = self._select(train, targets, texts)
        self.notes.extend(self._find_overlaps(samples))
        for split, (table, encoded) in samples.items():
            (folder / split).mkdir()
            self._write_split(folder / split, table, targets)
            self.notes.extend(targets.save(folder / split, table, encoded, self.tokenizer))
        meta = {
            "targets": asdict(targets),
            "text_column": texts["text_column"],
            "max_length": self.facts["max_length"],
            "notes": self.notes,
            "splits": list(samples),
            "files": {split: table.name for split, table in self.tables.items()},
        }
        (folder / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")

    def _select(self, train: Table, targets: Targets, texts: Mapping[str, str]) -> _Samples:
        encoded = targets.encode(train)
        samples = {"train": (train, encoded)}
        if "validation" not in self.tables:
            for split, places in self._hold_out(train, targets.strata(encoded)).items():
                samples[split] = train.select(places), encoded[places]
        for split, table in self.tables.items():
            if split == "test" and targets.all_missing(table):
                line = "has no labels: it is left out (`toolkit predict` labels it)"
                self.notes.append(f"{table.name} {line}")
            elif split != "train":
                selected = self._with_texts(table, texts)
                samples[split] = selected, targets.encode(selected)
        return {split: self._limit(split, *samples[split]) for split in samples}

    def _find_texts(self) -> dict[str, str]:
        """Setting -> column, of each text that must not be empty."""
        train = self.tables["train"]
        data = self.settings.data
        targets = targets_of(self.settings)
        pair = getattr(data, "text_pair", None)
        predicted: tuple[str, ...] = ()
        setting = targets.column_setting
        if setting:
            predicted = train.find_columns(getattr(data, setting), targets.usual_columns, setting)
        column = train.text_column(data.text_column, [*predicted, pair])
        pair = train.pair_column(pair, column)
        columns = train.columns_of(column)
        both = {*columns, *train.columns_of(pair or column)}.intersection(predicted)
        if both:
            raise UserError(
                f"{train.name}: column {listing(sorted(both))} is to be read and predicted: name "
                f"another --{setting}"
            )
        if len(columns) > 1:
            separator = tokens.separator_of(self.tokenizer)
            line = f"columns {', '.join(columns)} are one text, with {separator} between them"
            self.notes.append(line)
        texts = {"text_column": column}
        if pair:
            texts["text_pair"] = pair
        return texts | targets.text_columns(self.settings, train, column)

    def _with_texts(self, table: Table, texts: Mapping[str, str]) -> Table:
        """The rows in which no text is empty, or shorter than `--min_length`. Raises UserError
        naming the rows with empty texts, unless `--drop_empty_text` allows them."""
        inputs = [texts[name] for name in ("text_column", "text_pair") if name in texts]
        table = table.reading(tuple(inputs), tokens.separator_of(self.tokenizer))
        is_blank = self._read_texts(table, list(texts.values()))
        for (setting, column), flags in zip(texts.items(), is_blank, strict=True):
            what = setting.removesuffix("_column").replace("_pair", "")  # the text, or the title
            self._refuse_blank(table, f"{what} in column {column!r}", flags, setting)
        places = np.flatnonzero(~is_blank.any(axis=0))
        columns = " or ".join(texts.values())
        if not len(places):
            raise UserError(f"{table.name}: in every row {columns} is empty")
        dropped = len(table) - len(places)
        if dropped:
            self.notes.append(f"{table.name}: {dropped} rows with an empty {columns} are left out")
            table = table.select(places)
        return self._drop_short(table)

    def _read_texts(self, table: Table, columns: Sequence[str]) -> np.ndarray:
        """(columns, rows) bool: where a text is blank. Remembers the hashes of what the model
        reads."""
        blank = [np.zeros((len(columns), 0), bool)]
        hashes = [np.zeros(0, np.int64)]
        for block in table.text_blocks(columns, table.separator):
            blank.append(np.array([[not text.strip() for text in column] for column in block]))
            rows = zip(*block[: len(table.text_columns)], strict=True)
            hashes.append(np.fromiter(map(hash, rows), np.int64, len(block[0])))
        self.hashes[table.name] = np.concatenate(hashes)
        return np.concatenate(blank, axis=1)

    def _refuse_blank(self, table: Table, what: str, flags: np.ndarray, setting: str) -> None:
        if flags.all():
            others = len(table.rows.column_names) > 1
            remedy = f": name another with --{setting}" if others else ""
            raise UserError(f"{table.name}: every {what} is empty{remedy}")
        if flags.any() and not self.settings.data.drop_empty_text:
            hint = ""
            if table.name.endswith(".txt"):
                hint = " (or --sample_by paragraph, if they separate texts)"
            rows = table.listing(np.flatnonzero(flags))
            raise UserError(
                f"{table.name}: the {what} is empty in {flags.sum()} of {len(flags)} rows (rows "
                f"{rows}): fill them, or pass --drop_empty_text{hint}"
            )

    def _drop_short(self, table: Table) -> Table:
        """The rows with at least `--min_length` tokens. Raises UserError when there are none."""
        least = self.settings.data.min_length
        if least is None:
            return table
        what = f"lengths of {table.name}"
        blocks = tokens.encode_blocks(self.tokenizer, table.texts(), least, len(table), what)
        places = np.flatnonzero(np.concatenate([block.lengths for block in blocks]) >= least)
        if not len(places):
            remedy = "lower --min_length, or leave it out"
            raise UserError(f"{table.name}: no text has {least} tokens: {remedy}")
        shorter = f"{len(table) - len(places)} of {len(table)} texts have fewer than {least} tokens"
        self.notes.append(f"{table.name}: {shorter} and are left out (--min_length)")
        return table.select(places)

    def _hold_out(self, table: Table, strata: np.ndarray | None) -> dict[str, np.ndarray]:
        """The places of the rows of train and validation, stratified by class. Raises UserError for
        too few rows."""
        from sklearn.model_selection import train_test_split

        share = self.settings.data.validation_split
        seed = data_seed(self.settings)
        places = np.arange(len(table))
        if strata is not None:
            repeats = np.bincount(strata)[strata] > 1  # a class of one row can only be trained on
            places = places[repeats]
            strata = strata[repeats]
        count = max(1, round(len(places) * share))
        if count >= len(places):
            raise UserError(
                f"{table.name}: {len(places)} rows whose class is not theirs alone are too few to "
                f"hold out a part of {share:g} for validation: pass --validation_file, or another "
                "--validation_split; is the label column right?"
            )
        if strata is not None and min(count, len(places) - count) < len(np.unique(strata)):
            strata = None
            self.notes.append(f"{table.name}: too few rows to hold out some of each class")
        _, validation = train_test_split(
            places, test_size=count, random_state=seed, stratify=strata
        )
        held_out = f"{count} of {len(table)} rows are held out for validation"
        self.notes.append(f"{table.name}: {held_out} (--validation_split {share:g}, seed {seed})")
        is_held_out = np.zeros(len(table), bool)
        is_held_out[validation] = True
        return {"train": np.flatnonzero(~is_held_out), "validation": np.flatnonzero(is_held_out)}

    def _limit(self, split: str, table: Table, encoded: np.ndarray) -> tuple[Table, np.ndarray]:
        """At most `--max_train_samples` or `--max_eval_samples` rows, drawn by the seed, in their
        order."""
        setting = "max_train_samples" if split == "train" else "max_eval_samples"
        limit = getattr(self.settings.data, setting)
        count = len(table)
        if limit is None or limit >= count:
            return table, encoded
        self.notes.append(f"{split}: {limit} of {count} rows are used (--{setting})")
        order = np.random.default_rng(data_seed(self.settings)).permutation(count)
        places = np.sort(order[:limit])
        return table.select(places), encoded[places]

    def _write_split(self, folder: Path, table: Table, targets: Targets) -> None:
        blocks: Iterator[tokens.TextBlock] = table.texts()
        split = folder.name
        if split != "train":  # for reports
            excluded = [name for column in table.text_columns for name in table.columns_of(column)]
            excluded += getattr(targets, "columns", ())
            tokens.write_lines(folder / "groups.jsonl", _group_cells(table, excluded))
            blocks = tokens.save_texts(folder / "texts.jsonl", blocks)
        length = self.facts["max_length"]
        what = f"tokens of {split}"
        encoded = tokens.encode_blocks(self.tokenizer, blocks, length, len(table), what)
        counts = tokens.save_tokens(folder, encoded, unknown=self.tokenizer.unk_token_id)
        self.notes.extend(_token_notes(split, counts, len(table), length))
        np.save(folder / "rows.npy", table.row_numbers)

    def _find_overlaps(self, samples: _Samples) -> Iterator[str]:
        """Notes on texts (or pairs) of another split that are also in the training data."""
        train, _ = samples["train"]
        hashes = self.hashes[train.name][train.row_numbers]
        others = [split for split in samples if split != "train"]
        for split in others:
            table, _ = samples[split]
            seen = np.isin(self.hashes[table.name][table.row_numbers], hashes)
            if seen.any():
                rows = table.listing(table.row_numbers[seen])
                yield (
                    f"{split}: {seen.sum()} of {len(seen)} texts are also in the training "
                    "data: its "
                    f"scores will be too high (rows {rows})"
                )


def data_seed(settings: Any) -> int:
    """The seed that rows are drawn with: `--data_seed`, or the run's seed."""
    if settings.data.data_seed is None:
        return int(settings.training.seed)
    return int(settings.data.data_seed)


def _group_cells(table: Table, excluded: Sequence[str]) -> Iterator[dict[str, str]]:
    """{column: cell} of each row, of the columns with 2 to 20 distinct values, by which metrics are
    grouped in reports."""
    limit = min(_MAX_GROUPS, len(table) // 2)
    values: dict[str, set[str]] = {
        name: set() for name in table.rows.column_names if name not in excluded
    }
    for _, cells in table.cells(list(values)):
        for name, column in zip(list(values), cells, strict=True):
            if len(values[name]) <= limit:
                values[name].update(map(str, column))
    names = [name for name, cells in values.items() if 1 < len(cells) <= limit]
    for _, cells in table.cells(names):
        for row in zip(*cells, strict=True):
            yield dict(zip(names, map(str, row), strict=True))


def _token_notes(split: str, counts: tokens.Counts, rows: int, max_length: int) -> Iterator[str]:
    """Raises UserError if most tokens are unknown: the model cannot read the language of the
    texts."""
    unknown = counts.unknown / max(1, counts.tokens)
    share = f"{split}: {100 * unknown:.0f} % of the tokens are unknown to this model's tokenizer"
    if unknown > MAX_UNKNOWN:
        raise UserError(
            f"{share}: choose a --model_name_or_path that reads the language of these texts "
            "(bert-base-chinese, say)"
        )
    if unknown > WARN_UNKNOWN:
        yield f"{share}: does it read the language of these texts?"
    if counts.truncated:
        share = f"{100 * counts.truncated / rows:.1f} %"
        yield f"{split}: {share} of the texts are cut at {max_length} tokens (--max_length)"


def split_of_texts(
    name: str,
    tokenizer: Any,
    model_config: Any,
    max_length: int,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    shared_as: str | None = None,
) -> Split:
    """A split of texts (and second texts of pairs) in memory; all labels are 0.

    With `shared_as`, a digest, it lies in a cache folder that one process per machine writes and
    the caller removes."""
    if shared_as is None:
        arrays = _arrays(tokenizer, texts, max_length, pairs)
        return Split(name, Path(), **tokens.of_model(arrays, model_config))
    with cached_folder("tokens", shared_as, None, "texts to predict") as (folder, draft):
        if draft:
            (draft / name).mkdir()
            for file, array in _arrays(tokenizer, texts, max_length, pairs).items():
                np.save(draft / name / f"{file}.npy", array)
    return tokens.load_split(folder, name, model_config)


def _arrays(
    tokenizer: Any, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None
) -> dict[str, np.ndarray]:
    rows = np.arange(len(texts), dtype=np.int64)
    arrays = tokens.encode_texts(tokenizer, texts, max_length, pairs)
    return arrays | {"rows": rows, "labels": np.zeros_like(rows)}
