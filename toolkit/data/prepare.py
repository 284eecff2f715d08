"""Settings -> tables -> rows -> a cached folder of tokens and targets -> splits: the data of a run."""

from __future__ import annotations

import contextlib
import gc
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
from toolkit.data.table import Rows, Table
from toolkit.data.targets import Targets, targets_of
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.utils.cache import cached_folder, digest_of_text
from toolkit.utils.features import features

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAYOUT = 2  # increase when the content of a prepared folder changes
WARN_UNKNOWN, MAX_UNKNOWN = (
    0.05,
    0.5,
)  # shares of all tokens; “ and ” are unknown to bert-base-chinese


@dataclass(frozen=True)
class Prepared:
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
    """(classes,) float32, on the device: the weight of positive labels in the loss (--pos_weight)."""
    advice: str = ""
    """A line if the classes are imbalanced and no setting compensates for it."""

    @property
    def labels(self) -> Labels:
        """The targets, if these are labels."""
        return cast(Labels, self.targets)

    @property
    def splits(self) -> dict[str, Split]:
        return {
            split.name: split
            for split in (self.train, self.validation, self.test)
            if split is not None
        }

    def with_collator(self, collator: Any) -> Prepared:
        """The same with this collator (as in `Split.collator`) for every split."""
        splits: Any = {
            name: replace(split, collator=collator) for name, split in self.splits.items()
        }
        return replace(self, **splits)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(split) for name, split in self.splits.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """The task, which must be equal in a checkpoint and the run that resumes from it. JSON."""
        return self.targets.facts() | ({"text_pair": self.text_pair} if self.text_pair else {})


def prepare_data(
    settings: Any, tokenizer: Any, model_config: Any, accelerator: Accelerator | None = None
) -> Prepared:
    """Tokenizes the texts and encodes their targets, in one process per machine; all processes load them. Raises
    UserError for every fault of the input, and when machines have different data."""
    data = settings.data
    several = accelerator if accelerator is not None and accelerator.num_processes > 1 else None
    if several is not None:
        _require_equal_settings(several, settings)
    if data.preprocessing_num_workers:  # the tokenizer reads it at its first call
        os.environ["RAYON_NUM_THREADS"] = str(data.preprocessing_num_workers)
    targets_class = targets_of(settings)
    targets_class.check(settings, tokenizer)
    tokens.refuse_foreign_tokenizer(tokenizer, model_config)
    tables = read_tables(data, targets_class.column_setting is not None)
    facts = _facts(settings, tokenizer, model_config, targets_class, "validation" in tables)
    length, longest = (
        getattr(getattr(settings, "long", None), "compare_max_length", None),
        facts["max_length"],
    )
    if length and length >= longest:
        raise UserError(
            f"--compare_max_length {length}: texts are cut at {longest} tokens anyway: pass fewer"
        )
    fingerprint, digests = (
        tokens.fingerprint(tokenizer),
        {split: table.digest for split, table in tables.items()},
    )
    if several is not None:  # before an hour of work on different data
        content = {
            f"the content of the {split} data": digest[:12] for split, digest in digests.items()
        }
        launch.require_equal(
            several, "the data", {**content, **facts, "the tokenizer": fingerprint[:12]}
        )
    facts |= {"tables": digests, "tokenizer": fingerprint}
    digest = digest_of_text(json.dumps(facts, sort_keys=True))
    source = ", ".join(table.name for table in tables.values())
    with cached_folder("tokens", digest, several, source) as (folder, draft):
        if draft:
            _Preparation(settings, tokenizer, targets_class, facts, tables).write(draft)

    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    splits = {
        name: tokens.load_split(folder, name, model_config, targets_class.split_class)
        for name in meta["splits"]
    }
    targets: Any = targets_class.from_json(meta["labels"])
    # the same content may have been tokenized under another name
    names = {file: tables[split].name for split, file in meta.get("files", {}).items()}
    notes = [
        names.get(name, name) + colon + text
        for name, colon, text in (n.partition(": ") for n in meta["notes"])
    ]
    weights, advice, text_pair = None, "", getattr(data, "text_pair", None)
    if text_pair and not tokens.has_token_types(model_config):
        notes.append(
            "this model has one token type: only a separator distinguishes the two texts of a pair"
        )
    if objective := getattr(settings, "objective", None):  # a user's recipe may lack this section
        splits, weights, lines, advice = balance.weigh_classes(splits, targets, objective)
        notes += lines
    device = torch.device("cpu") if accelerator is None else accelerator.device
    return Prepared(
        folder=folder,
        digest=folder.name,
        text_column=meta["text_column"],
        text_pair=text_pair,
        max_length=facts["max_length"],
        notes=tuple(notes),
        targets=targets,
        train=splits["train"],
        validation=splits["validation"],
        test=splits.get("test"),
        file_digests=digests,
        pos_weight=None if weights is None else torch.from_numpy(weights).to(device),
        advice=advice,
    )


def _require_equal_settings(accelerator: Accelerator, settings: Any) -> None:
    """Raises UserError if processes have different settings. Paths may differ: their content is compared later."""
    paths = {"train_file", "validation_file", "test_file", "label_names_file", "model_name_or_path"}
    paths |= {"dataset_name"} if Path(str(settings.data.dataset_name)).is_dir() else set()
    values = {name: value for name, value in flat(settings).items() if name not in paths}
    launch.require_equal(accelerator, "the settings", values)


def _facts(
    settings: Any,
    tokenizer: Any,
    model_config: Any,
    targets_class: type[Targets],
    has_validation: bool,
) -> dict[str, Any]:
    """The settings that the tokens depend on; the seed only if rows are drawn."""
    data = settings.data
    pair = getattr(data, "text_pair", None) is not None
    facts = {"layout": _LAYOUT, **targets_class.data_facts(settings)}
    facts["max_length"] = tokens.choose_max_length(data.max_length, tokenizer, model_config, pair)
    facts |= {
        name: getattr(data, name) for name in ("text_column", "drop_empty_text", "validation_split")
    }
    optional = ("text_pair", "min_length", "max_train_samples", "max_eval_samples")
    facts |= {name: value for name in optional if (value := getattr(data, name, None)) is not None}
    if pair and "token_type_ids" not in tokenizer.model_input_names:
        facts["token_types"] = False
    if "," in (data.text_column or ""):
        facts["separator"] = tokens.separator_of(tokenizer)
    if not has_validation or data.max_train_samples or data.max_eval_samples:
        facts["seed"] = data_seed(settings)
    return facts


def finish_data(
    settings: Any, data: Prepared, tokenizer: Any, accelerator: Accelerator
) -> Prepared:
    """The data with the collator of their targets, and what features change (`Feature.data`)."""
    data = data.with_collator(type(data.targets).collator(settings))
    for feature in features():
        data = feature.data(settings, data, tokenizer, accelerator)
    return data


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The collector would scan all rows again and again: reading takes 1.5 times as long, tokenizing 1.05 times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Preparation:
    """The data of a run, from tables to a folder of tokens."""

    settings: Any
    tokenizer: Any
    targets_class: type[Targets]
    facts: Mapping[str, Any]
    tables: Mapping[str, Table]
    notes: list[str] = field(default_factory=list)

    @_no_garbage_collection()
    def write(self, folder: Path) -> None:
        """Selects and checks the rows of every split before tokenizing any; then writes them all to `folder`."""
        train, data, tokenizer, notes = (
            self.tables["train"],
            self.settings.data,
            self.tokenizer,
            self.notes,
        )
        setting, pair = self.targets_class.column_setting, getattr(data, "text_pair", None)
        usual = self.targets_class.usual_columns
        others = train.find_columns(getattr(data, setting), usual, setting) if setting else ()
        column = train.text_column(data.text_column, [*others, pair])
        pair = train.pair_column(pair, column)
        notes += [table.note for table in self.tables.values() if table.note]
        columns = train.columns_of(column)
        inputs = [*columns, *train.columns_of(pair or column)]
        if both := sorted({*inputs}.intersection(others)):
            raise UserError(
                f"{train.name}: column {listing(both)} is to be read and predicted: name another --{setting}"
            )
        if len(columns) > 1:
            separator = tokens.separator_of(tokenizer)
            notes.append(
                f"columns {', '.join(columns)} are one text, with {separator} between them"
            )
        targets, splits = self._select_rows(column, pair)
        for split, rows in splits.items():
            (folder / split).mkdir()
            texts: Iterator[tokens.TextBlock] = rows.texts()
            if split != "train":  # for reports
                cells = rows.group_cells([*inputs, *getattr(targets, "columns", ())])
                tokens.write_lines(folder / split / "groups.jsonl", cells)
                texts = tokens.save_texts(folder / split / "texts.jsonl", texts)
            blocks = tokens.encode_blocks(
                tokenizer, texts, self.facts["max_length"], len(rows), f"tokens of {split}"
            )
            counts = tokens.save_tokens(folder / split, blocks, unknown=tokenizer.unk_token_id)
            notes += _token_notes(split, counts, len(rows), self.facts["max_length"])
            np.save(folder / split / "rows.npy", rows.numbers)
            notes += targets.save(folder / split, rows, tokenizer)
        meta = {
            "labels": asdict(targets),
            "text_column": column,
            "notes": notes,
            "splits": list(splits),
        }
        meta["files"] = {split: table.name for split, table in self.tables.items()}
        (folder / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")

    def _select_rows(self, column: str, pair: str | None) -> tuple[Targets, dict[str, Rows]]:
        """(the targets, the rows of each split); `column`, `pair`: of the texts. Raises UserError for unusable rows."""
        settings, train, notes = self.settings, self.tables["train"], self.notes
        texts = {"text_column": column} | ({"text_pair": pair} if pair else {})
        texts |= self.targets_class.text_columns(settings, train, column)
        rows = self._with_texts(train, texts)
        targets = self.targets_class.find(settings, train, column, rows.numbers)
        splits = {"train": rows.encode_targets(targets)}
        for split, table in self.tables.items():
            if split == "train":
                continue
            if split == "test" and targets.all_missing(table):
                notes.append(
                    f"{table.name} has no labels: it is left out (`toolkit predict` labels it)"
                )
            else:
                splits[split] = self._with_texts(table, texts).encode_targets(targets)
        if "validation" not in splits:
            splits = {**self._hold_out(splits.pop("train"), targets), **splits}
        for split, rows in splits.items():
            splits[split], more = limit_rows(rows, split, settings)
            notes += more
        notes += _find_overlaps(splits)
        return targets, splits

    def _with_texts(self, table: Table, texts: Mapping[str, str]) -> Rows:
        """The rows in which no text is empty, or shorter than `--min_length`; `texts`: columns by the settings that
        name them. Raises UserError naming the rows with empty texts, unless `--drop_empty_text` allows them."""
        inputs = tuple(
            texts[setting] for setting in ("text_column", "text_pair") if setting in texts
        )
        separator = tokens.separator_of(self.tokenizer)
        empty, hashes = [np.zeros((len(texts), 0), bool)], [np.zeros(0, np.int64)]
        for block in table.text_blocks(list(texts.values()), separator):
            empty.append(np.array([[not text.strip() for text in column] for column in block]))
            rows = zip(*block[: len(inputs)], strict=True)
            hashes.append(np.fromiter(map(hash, rows), np.int64, len(block[0])))
        flags = np.concatenate(empty, axis=1)  # (columns, rows)
        for (setting, column), blank in zip(texts.items(), flags, strict=True):
            # the text, or the title
            what = f"{setting.removesuffix('_column').replace('_pair', '')} in column {column!r}"
            if blank.all():
                way = f": name another with --{setting}" * (len(table.rows.column_names) > 1)
                raise UserError(f"{table.name}: every {what} is empty{way}")
            if blank.any() and not self.settings.data.drop_empty_text:
                hint = " (or --sample_by paragraph, if they separate texts)" * table.name.endswith(
                    ".txt"
                )
                raise UserError(
                    f"{table.name}: the {what} is empty in {blank.sum()} of {len(blank)} rows (rows "
                    f"{table.listing(np.flatnonzero(blank))}): fill them, or pass --drop_empty_text{hint}"
                )
        numbers = np.flatnonzero(~flags.any(axis=0))
        if not len(numbers):
            raise UserError(f"{table.name}: in every row one of {listing(texts.values())} is empty")
        if dropped := flags.shape[1] - len(numbers):
            names = " or ".join(texts.values())
            self.notes.append(f"{table.name}: {dropped} rows with an empty {names} are left out")
        return self._drop_short(
            Rows(table, inputs, separator, numbers, np.concatenate(hashes)[numbers], np.zeros(0))
        )

    def _drop_short(self, rows: Rows) -> Rows:
        """The rows with at least `--min_length` tokens. Raises UserError when there are none."""
        name, least = rows.table.name, self.settings.data.min_length
        if least is None:
            return rows
        blocks = tokens.encode_blocks(
            self.tokenizer, rows.texts(), least, len(rows), f"lengths of {name}"
        )
        places = np.flatnonzero(np.concatenate([block.lengths for block in blocks]) >= least)
        if not len(places):
            raise UserError(
                f"{name}: no text has {least} tokens: lower --min_length, or leave it out"
            )
        shorter = f"{len(rows) - len(places)} of {len(rows)} texts have fewer than {least} tokens"
        self.notes.append(f"{name}: {shorter} and are left out (--min_length)")
        return rows.take(places)

    def _hold_out(self, rows: Rows, targets: Targets) -> dict[str, Rows]:
        """{"train": rows, "validation": rows}, stratified by class. Raises UserError for too few rows."""
        share, seed = self.settings.data.validation_split, data_seed(self.settings)
        name, places, strata = rows.table.name, np.arange(len(rows)), targets.strata(rows.targets)
        if strata is not None:
            single = np.bincount(strata)[strata] < 2  # a class of one row can only be trained on
            places, strata = places[~single], strata[~single]
            if not len(places):
                raise UserError(
                    f"{name}: each class has one row: is --{targets.column_setting} right?"
                )
        count = max(1, round(len(places) * share))
        if count >= len(places):
            raise UserError(
                f"{name}: {len(rows)} rows are too few to hold out a part of {share:g} for validation: pass "
                "--validation_file, or another --validation_split"
            )
        if strata is not None and min(count, len(places) - count) < len(np.unique(strata)):
            strata = None
            self.notes.append(f"{name}: too few rows to hold out some of each class")
        validation = np.zeros(len(rows), bool)
        validation[places[_stratified_sample(strata, len(places), count, seed)]] = True
        held_out = f"{count} of {len(rows)} rows are held out for validation"
        self.notes.append(f"{name}: {held_out} (--validation_split {share:g}, seed {seed})")
        parts = {"train": ~validation, "validation": validation}
        return {split: rows.take(np.flatnonzero(part)) for split, part in parts.items()}


def data_seed(settings: Any) -> int:
    """The seed that rows are drawn with: `--data_seed`, or the run's seed."""
    return int(
        settings.training.seed if settings.data.data_seed is None else settings.data.data_seed
    )


def limit_rows(rows: Rows, split: str, settings: Any) -> tuple[Rows, list[str]]:
    """(at most `--max_train_samples` or `--max_eval_samples` rows, drawn by the seed, in their order; notes)."""
    setting = "max_train_samples" if split == "train" else "max_eval_samples"
    limit = getattr(settings.data, setting)
    if limit is None or limit >= len(rows):
        return rows, []
    places = np.sort(np.random.default_rng(data_seed(settings)).permutation(len(rows))[:limit])
    return rows.take(places), [f"{split}: {limit} of {len(rows)} rows are used (--{setting})"]


def _stratified_sample(
    strata: np.ndarray | None, count: int, held_out: int, seed: int
) -> np.ndarray:
    """Indices of `held_out` of `count` rows: those that scikit-learn's StratifiedShuffleSplit (ShuffleSplit without
    strata) draws with this seed, in a sixth of its memory: 0.65 GB less for ten million rows."""
    random = np.random.RandomState(seed)
    if strata is None:
        return random.permutation(count)[:held_out]
    counts = np.bincount(strata)
    counts = counts[counts > 0]
    train = _proportional(counts, count - held_out, random)
    validation = _proportional(counts - train, held_out, random)
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


def _find_overlaps(splits: dict[str, Rows]) -> Iterator[str]:
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


def _token_notes(split: str, counts: tokens.Counts, rows: int, max_length: int) -> Iterator[str]:
    """Raises UserError if most tokens are unknown: the model cannot read the language of the texts."""
    unknown = counts.unknown / max(1, counts.tokens)
    share = f"{split}: {100 * unknown:.0f} % of the tokens are unknown to this model's tokenizer"
    if unknown > MAX_UNKNOWN:
        raise UserError(
            f"{share}: choose a --model_name_or_path that reads the language of these texts (bert-base-chinese, say)"
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

    With `shared_as`, a digest, it lies in a cache folder that one process per machine writes and the caller removes.
    """
    rows = np.arange(len(texts), dtype=np.int64)

    def arrays() -> dict[str, Any]:
        return {
            **tokens.encode_texts(tokenizer, texts, max_length, pairs),
            "rows": rows,
            "labels": rows * 0,
        }

    if shared_as is not None:
        with cached_folder("tokens", shared_as, None, "texts to predict") as (folder, draft):
            if draft:
                (draft / name).mkdir()
                for file, array in arrays().items():
                    np.save(draft / name / f"{file}.npy", array)
        return tokens.load_split(folder, name, model_config)
    return Split(name, Path(), **tokens.of_model(arrays(), model_config))
