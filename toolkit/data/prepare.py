"""Files or hub -> one folder of tokens and targets per machine, named after everything it depends on."""

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
from toolkit.config import ObjectiveSettings, flat
from toolkit.data import balance, tokens
from toolkit.data import rows as selection
from toolkit.data.labels import Labels
from toolkit.data.read import Table, columns_of, find_columns, read_tables
from toolkit.data.rows import Rows, Targets, text_column
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.utils.cache import digest_of_text, made_once
from toolkit.utils.features import features, first

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAYOUT = 2  # raise when what a prepared folder holds changes
MENTION_UNKNOWN, MOST_UNKNOWN = 0.02, 0.5  # parts of all tokens


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
    """Lines worth telling the user: sizes, cut texts, overlaps."""
    targets: Targets
    train: Split
    validation: Split
    test: Split | None
    feature_facts: Mapping[str, Any] = field(default_factory=dict)
    """What features added to what the data depend on (`Feature.data_facts`)."""

    @property
    def fold(self) -> int | None:
        return self.feature_facts.get("fold")

    pos_weight: torch.Tensor | None = None
    """(classes,) float32, on the device: what a label that is present weighs in the loss (--pos_weight)."""
    advice: str = ""
    """A line where the classes are uneven and nothing is done about it."""

    @property
    def labels(self) -> Labels:
        """What is learned of labelled texts."""
        return cast(Labels, self.targets)

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each split."""
        return {split.name: len(split) for split in (self.train, self.validation, self.test) if split is not None}

    @property
    def facts(self) -> dict[str, Any]:
        """What is learned; a checkpoint and the run that goes on from it have it in common. JSON."""
        return self.targets.facts() | ({"text_pair": self.text_pair} if self.text_pair else {})


def prepare_data(settings: Any, tokenizer: Any, model_config: Any, accelerator: Accelerator | None = None) -> Prepared:
    """Tokens of texts and of what is learned from them, made by one process per machine, loaded by all.

    Raises UserError for every fault of the input, and when machines hold other data.
    """
    if accelerator is not None:  # paths may differ between machines: what the files hold is compared below
        local = Path(str(settings.data.dataset_name)).is_dir()
        paths = ["train_file", "validation_file", "test_file", "label_names_file", "model_name_or_path"]
        paths += [name for feature in features() for name in feature.paths]
        paths += ["dataset_name"] * local
        values = {name: value for name, value in flat(settings).items() if name not in paths}
        launch.same_everywhere(accelerator, "the settings", values)
    if settings.data.preprocessing_num_workers:  # the tokenizer looks when it makes its first tokens
        os.environ["RAYON_NUM_THREADS"] = str(settings.data.preprocessing_num_workers)
    job = _Job(settings, tokenizer, model_config)
    tokens.refuse_foreign_tokenizer(tokenizer, model_config)
    tables = read_tables(settings.data)
    asked, kind = job.asked("validation" in tables), tokens.fingerprint(tokenizer)
    digests = {split: table.digest for split, table in tables.items()}
    if accelerator is not None:  # before an hour of work on what is not the same
        content = {f"the content of the {split} data": digest[:12] for split, digest in digests.items()}
        launch.same_everywhere(accelerator, "the data", {**content, **asked, "the tokenizer": kind[:12]})
    asked |= {"tables": digests, "tokenizer": kind}
    for feature in features():
        job.feature_facts |= feature.data_facts(settings, asked, accelerator)
    if accelerator is not None and job.feature_facts:
        launch.same_everywhere(accelerator, "the data", job.feature_facts)
    digest = digest_of_text(json.dumps(asked | job.feature_facts, sort_keys=True))
    source = ", ".join(table.name for table in tables.values())
    loaded = job.load(made_once("tokens", digest, lambda draft: job.make(draft, tables), accelerator, source))
    objective = getattr(settings, "objective", None)  # of labels; a recipe may have settings of its own without them
    device = torch.device("cpu") if accelerator is None else accelerator.device
    return _balanced(loaded, objective, device) if objective else loaded


def _balanced(data: Prepared, asked: ObjectiveSettings, device: torch.device) -> Prepared:
    """With what is asked for uneven classes."""
    labels, every = data.labels, {"train": data.train, "validation": data.validation, "test": data.test}
    balance.refuse_unfit(labels, asked)
    splits: Any = balance.balanced({name: split for name, split in every.items() if split}, labels, asked)
    weights = balance.positive_weights(data.train, labels, asked)
    pos_weight = None if weights is None else torch.from_numpy(weights).to(device)
    lines, advice = balance.describe(splits["train"], labels, asked)
    return replace(data, **splits, pos_weight=pos_weight, notes=(*data.notes, *lines), advice=advice)


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

    It is in memory, or, where it is `shared_as` some digest, in a folder of the cache that one process of the machine
    makes; who asked for it removes it.
    """
    rows = np.arange(len(texts), dtype=np.int64)

    def arrays() -> dict[str, np.ndarray]:
        return {**tokens.encode(tokenizer, texts, max_length, pairs=pairs), "rows": rows, "labels": rows * 0}

    def save(draft: Path) -> None:
        (draft / name).mkdir()
        for file, array in arrays().items():
            np.save(draft / name / f"{file}.npy", array)

    if shared_as is not None:
        return tokens.load_split(made_once("tokens", shared_as, save, None, "texts to predict"), name, model_config)
    made = arrays()
    if not tokens.tells_pairs_apart(model_config):
        made.pop("token_types", None)
    return Split(name, Path(), buckets=tokens.LengthBuckets.of_model(model_config), **made)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without the garbage collector, which would look at all rows in hand again and again: they are read in two thirds
    of the time, and tokenized 5 % faster."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Job:
    """What one job's tokens are made of."""

    def __init__(self, settings: Any, tokenizer: Any, model_config: Any) -> None:
        self.settings, self.data = settings, settings.data
        self.targets: type[Targets] = first(feature.targets(settings) for feature in features()) or Labels
        self.targets.check(settings, tokenizer)
        self.pair: str | None = getattr(settings.data, "text_pair", None)
        self.tokenizer, self.model_config = tokenizer, model_config
        self.max_length = tokens.choose_max_length(self.data.max_length, tokenizer, model_config, self.pair is not None)
        self.separator = tokens.separator_of(tokenizer)
        self.seed = settings.training.seed if self.data.data_seed is None else self.data.data_seed
        self.feature_facts: dict[str, Any] = {}
        self.notes: list[str] = []

    def asked(self, has_validation: bool) -> dict[str, Any]:
        """What the tokens depend on beside the content of the files and the tokenizer; a seed only where it draws
        rows."""
        always = ["text_column", "drop_empty_text", "validation_split"]
        given = ("text_pair", "min_length", "max_train_samples", "max_eval_samples")
        asked = {name: getattr(self.data, name) for name in always}
        asked |= {name: value for name in given if (value := getattr(self.data, name, None)) is not None}
        asked |= self.targets.data_facts(self.settings)
        if "," in (self.data.text_column or ""):
            asked["separator"] = self.separator
        if not has_validation or self.data.max_train_samples or self.data.max_eval_samples:
            asked["seed"] = self.seed
        return {"layout": _LAYOUT, "max_length": self.max_length, **asked}

    def load(self, folder: Path) -> Prepared:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        splits = {name: tokens.load_split(folder, name, self.model_config) for name in meta["splits"]}
        notes = list(meta["notes"])
        if self.pair and not tokens.tells_pairs_apart(self.model_config):
            notes.append("this model has one token type: a separator alone tells the two texts of a pair apart")
        return Prepared(
            folder=folder,
            digest=folder.name,
            text_column=meta["text_column"],
            text_pair=self.pair,
            max_length=self.max_length,
            notes=tuple(notes),
            targets=self.targets.from_json(meta["labels"]),
            train=splits["train"],
            validation=splits["validation"],
            test=splits.get("test"),
            feature_facts=self.feature_facts,
        )

    @_no_collections()
    def make(self, draft: Path, tables: dict[str, Table]) -> None:
        """Checks every split before any is tokenized, and writes them to `draft`."""
        train = tables["train"]
        setting = self.targets.column_setting
        taken = find_columns(train, getattr(self.data, setting), self.targets.usual_columns, setting)
        column = text_column(train, self.data.text_column, [*taken, self.pair])
        self.notes += [table.said for table in tables.values() if table.said]
        if len(columns := columns_of(train, column)) > 1:
            self.notes.append(f"columns {', '.join(columns)} are one text, with {self.separator} between them")
        targets, chosen = self._choose(tables, column)
        selection.note_overlap(chosen, self.notes)
        for split, rows in chosen.items():
            folder = draft / split
            folder.mkdir()
            blocks = tokens.encoded(self.tokenizer, rows.texts(), self.max_length, len(rows), f"tokens of {split}")
            counts = tokens.save_tokens(folder, blocks, unknown=self.tokenizer.unk_token_id)
            self._check_known(split, counts)
            if counts.cut:
                share = f"{split}: {100 * counts.cut / len(rows):.1f} % of the texts"
                self.notes.append(f"{share} are cut at {self.max_length} tokens (--max_length)")
            np.save(folder / "rows.npy", rows.numbers)
            targets.save(folder, rows, self.tokenizer, self.notes)
            if split != "train":  # for reports
                learned = [*columns, *columns_of(rows.table, self.pair or column), *getattr(targets, "columns", ())]
                tokens.save_strings(folder / "sources.jsonl", [selection.sources(rows, learned)])
                tokens.save_strings(folder / "texts.jsonl", (texts for texts, _ in rows.texts()))
                if self.pair:
                    tokens.save_strings(folder / "pairs.jsonl", (pairs or [] for _, pairs in rows.texts()))
        meta = {"labels": asdict(targets), "text_column": column, "notes": self.notes, "splits": list(chosen)}
        (draft / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")

    def _choose(self, tables: dict[str, Table], column: str) -> tuple[Targets, dict[str, Rows]]:
        """(what is learned, the rows of each split that take part)."""
        data, notes, train = self.data, self.notes, tables["train"]
        texts = {"text_column": column, "text_pair": selection.pair_column(train, self.pair, column)}
        texts |= self.targets.text_columns(self.settings, train, column)
        rows = self._usable(train, texts)
        targets = self.targets.find(self.settings, train, column, rows.numbers)
        chosen = {"train": replace(rows, targets=targets.encode(train, rows.numbers))}
        for feature in features():
            changed, more = feature.select_rows(self.settings, self.feature_facts, chosen["train"], targets)
            chosen |= changed
            notes += more
        others = {split: table for split, table in tables.items() if split not in chosen}
        if "validation" in chosen and others:
            notes.append(f"the other splits of the data take no part: {', '.join(others)}")
            others = {}
        for split, table in others.items():
            if split == "test" and targets.all_missing(table):
                notes.append(f"{table.name} has no labels: it is left out (`toolkit predict` labels it)")
                continue
            rows = self._usable(table, texts)
            chosen[split] = replace(rows, targets=targets.encode(table, rows.numbers))
        if "validation" not in chosen:
            held = selection.hold_back(chosen.pop("train"), targets, data.validation_split, self.seed, notes)
            chosen = {**held, **chosen}
        most = {split: data.max_train_samples if split == "train" else data.max_eval_samples for split in chosen}
        sampled = selection.sampled
        return targets, {split: sampled(rows, split, most[split], self.seed, notes) for split, rows in chosen.items()}

    def _usable(self, table: Table, columns: dict[str, str | None]) -> Rows:
        """The rows whose texts are neither empty nor too short."""
        rows = selection.usable_rows(table, columns, self.separator, self.data.drop_empty_text, self.notes)
        if self.data.min_length is None:
            return rows
        return selection.long_enough(rows, self.data.min_length, self.tokenizer, self.notes)

    def _check_known(self, split: str, counts: tokens.Counts) -> None:
        """Texts in a language the model cannot read would train, to nothing. Raises UserError then."""
        unknown = counts.unknown / max(1, counts.tokens)
        said = f"{split}: {100 * unknown:.0f} % of the tokens are unknown to this model's tokenizer"
        if unknown > MOST_UNKNOWN:
            raise UserError(
                f"{said}: choose a --model_name_or_path that reads the language of these texts (bert-base-chinese, say)"
            )
        if unknown > MENTION_UNKNOWN:
            self.notes.append(f"{said}: does it read the language of these texts?")
