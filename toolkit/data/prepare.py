"""Files or hub -> one folder of tokens and targets per machine, named after everything it depends on."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from toolkit import launch
from toolkit.config import ObjectiveSettings, flat
from toolkit.data import balance, tokens
from toolkit.data import rows as selection
from toolkit.data.labels import Labels
from toolkit.data.read import Table, columns_of, find_columns, read_tables
from toolkit.data.rows import Rows, Targets
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.utils.cache import cached_folder, digest_of_text
from toolkit.utils.features import features, first

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAYOUT = 2  # raise when the content of a prepared folder changes
WARN_UNKNOWN, MAX_UNKNOWN = 0.02, 0.5  # parts of all tokens


@dataclass(frozen=True)
class Prepared:
    """Everything a recipe needs of its data; the splits' arrays are mapped from `folder`."""

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
    feature_facts: Mapping[str, Any] = field(default_factory=dict)
    """What features added to what the data depend on (`Feature.data_facts`)."""
    pos_weight: torch.Tensor | None = None
    """(classes,) float32, on the device: the weight of a label that is present in the loss (--pos_weight)."""
    advice: str = ""
    """A line where the classes are uneven and no setting compensates for it."""

    @property
    def labels(self) -> Labels:
        """The targets of labelled texts."""
        return cast(Labels, self.targets)

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each split."""
        return {split.name: len(split) for split in (self.train, self.validation, self.test) if split is not None}

    @property
    def facts(self) -> dict[str, Any]:
        """The task: equal in a checkpoint and in the run that resumes from it. JSON."""
        return self.targets.facts() | ({"text_pair": self.text_pair} if self.text_pair else {})


def prepare_data(
    settings: Any,
    tokenizer: Any,
    model_config: Any,
    accelerator: Accelerator | None = None,
    targets_class: type[Targets] | None = None,
) -> Prepared:
    """Tokens of texts and their targets, made by one process per machine, loaded by all. `targets_class`: what is
    learned of a row; by default what a feature has for these settings, else `Labels`.

    Raises UserError for every fault of the input, and when machines have different data.
    """
    data = settings.data
    if accelerator is not None:
        _refuse_other_settings(accelerator, settings)
    if data.preprocessing_num_workers:  # the tokenizer reads it when it makes its first tokens
        os.environ["RAYON_NUM_THREADS"] = str(data.preprocessing_num_workers)
    targets_class = targets_class or first(feature.targets(settings) for feature in features()) or Labels
    targets_class.check(settings, tokenizer)
    tokens.refuse_foreign_tokenizer(tokenizer, model_config)
    tables = read_tables(data, targets_class.column_setting is not None)
    facts = _facts(settings, tokenizer, model_config, targets_class, "validation" in tables)
    fingerprint, digests = tokens.fingerprint(tokenizer), {split: table.digest for split, table in tables.items()}
    if accelerator is not None:  # before an hour of work on data that differ
        content = {f"the content of the {split} data": digest[:12] for split, digest in digests.items()}
        launch.require_equal(accelerator, "the data", {**content, **facts, "the tokenizer": fingerprint[:12]})
    facts |= {"tables": digests, "tokenizer": fingerprint}
    feature_facts: dict[str, Any] = {}
    for feature in features():
        feature_facts |= feature.data_facts(settings, facts, accelerator)
    if accelerator is not None and feature_facts:
        launch.require_equal(accelerator, "the data", feature_facts)
    facts |= feature_facts
    digest, source = (
        digest_of_text(json.dumps(facts, sort_keys=True)),
        ", ".join(table.name for table in tables.values()),
    )
    with cached_folder("tokens", digest, accelerator, source) as (folder, draft):
        if draft:
            _write(settings, tokenizer, targets_class, facts, tables, draft)

    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    splits = {name: tokens.load_split(folder, name, model_config, targets_class.split_class) for name in meta["splits"]}
    text_pair = getattr(data, "text_pair", None)
    if text_pair and not tokens.tells_pairs_apart(model_config):
        meta["notes"].append("this model has one token type: only a separator distinguishes the two texts of a pair")
    prepared = Prepared(
        folder=folder,
        digest=folder.name,
        text_column=meta["text_column"],
        text_pair=text_pair,
        max_length=facts["max_length"],
        notes=tuple(meta["notes"]),
        targets=targets_class.from_json(meta["labels"]),
        train=splits["train"],
        validation=splits["validation"],
        test=splits.get("test"),
        feature_facts=feature_facts,
    )
    objective = getattr(settings, "objective", None)  # of labels; a recipe may have settings of its own without them
    device = torch.device("cpu") if accelerator is None else accelerator.device
    return _balanced(prepared, objective, device) if objective else prepared


def _refuse_other_settings(accelerator: Accelerator, settings: Any) -> None:
    """Raises UserError where processes have different settings; paths may differ between machines, as the content of
    the files is compared later."""
    paths = {"train_file", "validation_file", "test_file", "label_names_file", "model_name_or_path"}
    paths |= {name for feature in features() for name in feature.paths}
    paths |= {"dataset_name"} if Path(str(settings.data.dataset_name)).is_dir() else set()
    values = {name: value for name, value in flat(settings).items() if name not in paths}
    launch.require_equal(accelerator, "the settings", values)


def _facts(
    settings: Any, tokenizer: Any, model_config: Any, targets_class: type[Targets], has_validation: bool
) -> dict[str, Any]:
    """What the tokens depend on beside the content of the files and the tokenizer; a seed only where rows are drawn."""
    data = settings.data
    pair = getattr(data, "text_pair", None) is not None
    facts = {"layout": _LAYOUT, **targets_class.data_facts(settings)}
    facts["max_length"] = tokens.choose_max_length(data.max_length, tokenizer, model_config, pair)
    facts |= {name: getattr(data, name) for name in ("text_column", "drop_empty_text", "validation_split")}
    optional = ("text_pair", "min_length", "max_train_samples", "max_eval_samples")
    facts |= {name: value for name in optional if (value := getattr(data, name, None)) is not None}
    if "," in (data.text_column or ""):
        facts["separator"] = tokens.separator_of(tokenizer)
    if not has_validation or data.max_train_samples or data.max_eval_samples:
        facts["seed"] = selection.seed_of(settings)
    return facts


def _balanced(data: Prepared, objective: ObjectiveSettings, device: torch.device) -> Prepared:
    """With the weights and chances that the settings have for uneven classes."""
    balance.refuse_unfit(data.labels, objective)
    splits: Any = {split.name: split for split in (data.train, data.validation, data.test) if split}
    splits = balance.balanced(splits, data.labels, objective)
    weights = balance.positive_weights(data.train, data.labels, objective)
    pos_weight = None if weights is None else torch.from_numpy(weights).to(device)
    lines, advice = balance.describe(splits["train"], data.labels, objective)
    return replace(data, **splits, pos_weight=pos_weight, notes=(*data.notes, *lines), advice=advice)


def with_collator(settings: Any, data: Prepared) -> Prepared:
    """The data, whose batches are made as a feature has it for these settings (`Feature.collator`)."""
    collator = first(feature.collator(settings) for feature in features())
    splits: Any = {split.name: split for split in (data.train, data.validation, data.test) if split}
    return replace(
        data, **{name: replace(split, collator=collator) for name, split in splits.items()} if collator else {}
    )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without the garbage collector, which would scan all rows in memory again and again: they are read in two thirds
    of the time, and tokenized 5 % faster."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collections()
def _write(
    settings: Any,
    tokenizer: Any,
    targets_class: type[Targets],
    facts: Mapping[str, Any],
    tables: Mapping[str, Table],
    folder: Path,
) -> None:
    """Selects and checks the rows of every split before any is tokenized, then writes them to `folder`."""
    train, data, separator = tables["train"], settings.data, tokens.separator_of(tokenizer)
    setting, pair = targets_class.column_setting, getattr(data, "text_pair", None)
    others = find_columns(train, getattr(data, setting), targets_class.usual_columns, setting) if setting else ()
    column = selection.text_column(train, data.text_column, [*others, pair])
    notes = [table.note for table in tables.values() if table.note]
    if len(columns := columns_of(train, column)) > 1:
        notes.append(f"columns {', '.join(columns)} are one text, with {separator} between them")
    targets, rows_of, more = _selected(settings, tokenizer, targets_class, facts, tables, column)
    notes += [*more, *selection.overlaps(rows_of)]
    for split, rows in rows_of.items():
        (folder / split).mkdir()
        texts: Iterator[tokens.TextBlock] = rows.texts()
        if split != "train":  # for reports
            inputs = [*columns, *columns_of(rows.table, pair or column), *getattr(targets, "columns", ())]
            deque(tokens.write_lines(folder / split / "groups.jsonl", selection.sources(rows, inputs)), maxlen=0)
            texts = tokens.write_lines(folder / split / "texts.jsonl", texts, tokens.text_items)
        blocks = tokens.encoded(tokenizer, texts, facts["max_length"], len(rows), f"tokens of {split}")
        counts = tokens.save_tokens(folder / split, blocks, unknown=tokenizer.unk_token_id)
        notes += _notes_on(split, counts, len(rows), facts["max_length"])
        np.save(folder / split / "rows.npy", rows.numbers)
        notes += targets.save(folder / split, rows, tokenizer)
    meta = {"labels": asdict(targets), "text_column": column, "notes": notes, "splits": list(rows_of)}
    (folder / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")


def _selected(
    settings: Any,
    tokenizer: Any,
    targets_class: type[Targets],
    facts: Mapping[str, Any],
    tables: Mapping[str, Table],
    column: str,
) -> tuple[Targets, dict[str, Rows], list[str]]:
    """(the targets, the rows of each split that take part, notes)."""
    data, train, seed, notes = settings.data, tables["train"], selection.seed_of(settings), list[str]()
    pair = selection.pair_column(train, getattr(data, "text_pair", None), column)
    texts = {"text_column": column} | ({"text_pair": pair} if pair else {})
    texts |= targets_class.text_columns(settings, train, column)

    def usable(table: Table) -> Rows:
        rows, more = selection.usable_rows(table, texts, tokens.separator_of(tokenizer), data.drop_empty_text)
        notes.extend(more)
        if data.min_length is not None:
            rows, note = selection.long_enough(rows, data.min_length, tokenizer)
            notes.append(note)
        return rows

    rows = usable(train)
    targets = targets_class.find(settings, train, column, rows.numbers)
    rows_of = {"train": rows.with_targets(targets)}
    for feature in features():
        changed, more = feature.select_rows(settings, facts, rows_of["train"], targets)
        rows_of |= changed
        notes += more
    others = {split: table for split, table in tables.items() if split not in rows_of}
    if "validation" in rows_of and others:
        notes.append(f"the other splits of the data take no part: {', '.join(others)}")
        others = {}
    for split, table in others.items():
        if split == "test" and targets.all_missing(table):
            notes.append(f"{table.name} has no labels: it is left out (`toolkit predict` labels it)")
        else:
            rows_of[split] = usable(table).with_targets(targets)
    if "validation" not in rows_of:
        parts, more = selection.hold_back(rows_of.pop("train"), targets, data.validation_split, seed)
        rows_of = {**parts, **rows_of}
        notes += more
    for split, rows in rows_of.items():
        most = data.max_train_samples if split == "train" else data.max_eval_samples
        rows_of[split], more = selection.sampled(rows, split, most, seed)
        notes += more
    return targets, rows_of, notes


def _notes_on(split: str, counts: tokens.Counts, rows: int, max_length: int) -> Iterator[str]:
    """Raises UserError for texts in a language the model cannot read: it would learn nothing."""
    unknown = counts.unknown / max(1, counts.tokens)
    share = f"{split}: {100 * unknown:.0f} % of the tokens are unknown to this model's tokenizer"
    if unknown > MAX_UNKNOWN:
        raise UserError(
            f"{share}: choose a --model_name_or_path that reads the language of these texts (bert-base-chinese, say)"
        )
    if unknown > WARN_UNKNOWN:
        yield f"{share}: does it read the language of these texts?"
    if counts.cut:
        yield f"{split}: {100 * counts.cut / rows:.1f} % of the texts are cut at {max_length} tokens (--max_length)"


def split_of_texts(
    name: str,
    tokenizer: Any,
    model_config: Any,
    max_length: int,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    shared_as: str | None = None,
) -> Split:
    """Texts in memory, without labels (all 0), as a split; and their second ones where they are pairs.

    The split is in memory, or, where `shared_as` is a digest, in a folder of the cache that one process of the machine
    makes; the caller removes it.
    """
    rows = np.arange(len(texts), dtype=np.int64)

    def arrays() -> dict[str, np.ndarray]:
        return {**tokens.encode(tokenizer, texts, max_length, pairs=pairs), "rows": rows, "labels": rows * 0}

    if shared_as is not None:
        with cached_folder("tokens", shared_as, None, "texts to predict") as (folder, draft):
            if draft:
                (draft / name).mkdir()
                for file, array in arrays().items():
                    np.save(draft / name / f"{file}.npy", array)
        return tokens.load_split(folder, name, model_config)
    in_memory: dict[str, Any] = arrays()
    if not tokens.tells_pairs_apart(model_config):
        in_memory.pop("token_types", None)
    return Split(name, Path(), buckets=tokens.LengthBuckets.of_model(model_config), **in_memory)
