"""Files or hub -> one folder of tokens and targets per machine, named after everything it depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit import launch
from toolkit.cache import made_once
from toolkit.config import DataSettings, Task, TaskSettings, TextSettings, TitleSettings, flat
from toolkit.data import demo, tokens
from toolkit.data.labels import Labels, find_labels
from toolkit.data.read import Table, read_file, read_hub
from toolkit.data.rows import (
    Rows,
    Targets,
    hold_back,
    long_enough,
    note_overlap,
    pair_column,
    sampled,
    text_column,
    texts_of,
    usable_rows,
    with_targets,
)
from toolkit.data.titles import Titles, find_titles
from toolkit.data.tokens import LengthBuckets, Split
from toolkit.demo import PREFIX
from toolkit.errors import UserError, listing

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAYOUT = 2  # raise when what a prepared folder holds changes
MENTION_UNKNOWN, MOST_UNKNOWN = 0.02, 0.5  # parts of all tokens
# the training table, its text column, the rows that are used -> what is learned
FindTargets = Callable[[Table, str, np.ndarray], Targets]


@dataclass(frozen=True)
class Prepared:
    """The splits of a job; the arrays are mapped from `folder`."""

    folder: Path
    digest: str
    max_length: int
    notes: tuple[str, ...]
    """Lines worth telling the user: sizes, cut texts, overlaps."""
    train: Split
    validation: Split
    test: Split | None
    text_column: str = field(default="", kw_only=True)
    """Several are separated by commas."""
    text_pair: str | None = field(default=None, kw_only=True)
    """The column of second texts."""

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each split."""
        return {split.name: len(split) for split in (self.train, self.validation, self.test) if split is not None}

    @property
    def facts(self) -> dict[str, Any]:
        """What is learned; a checkpoint and the run that goes on from it have it in common. JSON."""
        raise NotImplementedError

    @property
    def outputs(self) -> str:
        """What is learned, for the user."""
        raise NotImplementedError


@dataclass(frozen=True)
class TaskData(Prepared):
    """Everything a recipe needs of labelled texts."""

    labels: Labels

    @property
    def facts(self) -> dict[str, Any]:
        pair = {"text_pair": self.text_pair} if self.text_pair else {}
        return {"labels": list(self.labels.names), "problem_type": self.labels.problem_type, **pair}

    @property
    def outputs(self) -> str:
        names = self.labels.names
        return f"{len(names)} outputs: {', '.join(names[:8])}{'...' if len(names) > 8 else ''}"


@dataclass(frozen=True)
class TitleData(Prepared):
    """Everything a recipe needs of texts with titles; its splits are `TitleSplit`s."""

    titles: Titles

    @property
    def facts(self) -> dict[str, Any]:
        kind: Task = "title_generation"
        return {"labels": [], "problem_type": kind, "title_column": self.titles.column,
                "max_target_length": self.titles.max_length}  # fmt: skip

    @property
    def outputs(self) -> str:
        return f"titles of at most {self.titles.max_length} tokens, from column {self.titles.column}"


def prepare_data(
    settings: TaskSettings, tokenizer: Any, model_config: Any, accelerator: Accelerator | None = None
) -> TaskData:
    """Tokens and labels of a task, made by one process per machine, loaded by all.

    Raises UserError for every fault of the input, and when machines hold other data.
    """
    data, problem_type = settings.data, settings.model.problem_type
    _refuse_other_settings(settings, accelerator)

    def find(table: Table, column: str, kept: np.ndarray) -> Labels:
        return find_labels(table, data.label_column, problem_type, column, kept)

    asked = {"problem_type": problem_type, "label_column": data.label_column}
    if data.text_pair is not None:
        asked["text_pair"] = data.text_pair
        tokens.refuse_pairs(tokenizer, model_config)
    folder, meta = _prepared(data, settings.training.seed, asked, find, tokenizer, model_config, accelerator)
    return TaskData(**_common(folder, meta, model_config), labels=Labels.from_json(meta["labels"]))


def prepare_titles(
    settings: TitleSettings, tokenizer: Any, model_config: Any, accelerator: Accelerator | None = None
) -> TitleData:
    """Tokens of texts and of their titles; otherwise as `prepare_data`."""
    data = settings.data
    _refuse_other_settings(settings, accelerator)
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        raise UserError(f"{settings.model.model_name_or_path}: its tokenizer has no tokens that begin and end a title")

    def find(table: Table, column: str, kept: np.ndarray) -> Titles:
        return find_titles(table, data.title_column, column, data.max_target_length)

    asked = {"title_column": data.title_column, "max_target_length": data.max_target_length}
    folder, meta = _prepared(data, settings.training.seed, asked, find, tokenizer, model_config, accelerator)
    return TitleData(**_common(folder, meta, model_config), titles=Titles(**meta["labels"]))


def prepare_texts(
    table: Table,
    column: str,
    tokenizer: Any,
    model_config: Any,
    max_length: int,
    accelerator: Accelerator | None = None,
    pair: str | None = None,
) -> Split:
    """Tokens of every row of a table, without labels (all 0), made once per machine; `pair` is the second texts'
    column."""
    asked = [_LAYOUT, table.digest, column, tokens.fingerprint(tokenizer), max_length, *([pair] if pair else [])]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]

    def make(draft: Path) -> None:
        texts, pairs = texts_of(table, column), texts_of(table, pair) if pair else None
        arrays, _ = tokens.encode(tokenizer, texts, max_length, progress="tokens", pairs=pairs)
        rows = np.arange(len(texts), dtype=np.int64)
        tokens.save_split(draft / "texts", {**arrays, "rows": rows, "labels": np.zeros(len(texts), np.int64)})
        (draft / "meta.json").write_text("{}", encoding="utf-8")

    folder = made_once("tokens", digest, make, accelerator)
    return tokens.load_split(folder, "texts", LengthBuckets.of_model(model_config))


def _prepared(
    data: TextSettings,
    seed: int,
    more: dict[str, Any],
    find: FindTargets,
    tokenizer: Any,
    model_config: Any,
    accelerator: Accelerator | None,
) -> tuple[Path, dict[str, Any]]:
    """(the folder, its meta.json). The folder's name is the digest of `more` and everything else it depends on."""
    tables = read_tables(data)
    tokens.refuse_foreign_tokenizer(tokenizer, model_config)
    max_length = tokens.choose_max_length(data.max_length, tokenizer, model_config, _asked_pair(data) is not None)
    asked = {
        "layout": _LAYOUT,
        "tables": {split: table.digest for split, table in tables.items()},
        "tokenizer": tokens.fingerprint(tokenizer),
        "max_length": max_length,
        "seed": seed,
        **{name: getattr(data, name) for name in ("text_column", "drop_empty_text", "validation_split")},
        **{name: value for name in ("min_length", "max_train_samples", "max_eval_samples")
           if (value := getattr(data, name)) is not None},
        **more,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
    if accelerator is not None:  # before an hour of work on what is not the same
        content = {f"the content of the {split} data": table.digest[:12] for split, table in tables.items()}
        launch.same_everywhere(accelerator, "the data", {**content, **_compared(asked)})

    def make(draft: Path) -> None:
        _make(draft, tables, data, find, tokenizer, max_length, seed)

    folder = made_once("tokens", digest, make, accelerator)
    return folder, json.loads((folder / "meta.json").read_text(encoding="utf-8"))


def _refuse_other_settings(settings: TaskSettings | TitleSettings, accelerator: Accelerator | None) -> None:
    """Paths may differ between machines: what the files hold is compared later."""
    if accelerator is not None:
        paths = ("train_file", "validation_file", "test_file", "model_name_or_path")
        values = {name: value for name, value in flat(settings).items() if name not in paths}
        launch.same_everywhere(accelerator, "the settings", values)


def _compared(asked: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in asked.items() if name not in ("tables", "tokenizer")}
    return {**values, "the tokenizer": hashlib.sha256(str(asked["tokenizer"]).encode()).hexdigest()[:12]}


def read_tables(settings: TextSettings) -> dict[str, Table]:
    """The splits that were named: `train` and perhaps `validation` and `test`. Raises UserError."""
    if settings.dataset_name:
        name = settings.dataset_name
        found = demo.read_demo(name) if name.startswith(PREFIX) else read_hub(name, settings.dataset_config_name)
        names = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
        tables = {
            split: next(found[alias] for alias in aliases if alias in found)
            for split, aliases in names.items()
            if any(alias in found for alias in aliases)
        }
        if "train" not in tables:
            raise UserError(f"--dataset_name {name} has no train split: it has {listing(found)}")
        return tables
    files = {"train": settings.train_file, "validation": settings.validation_file, "test": settings.test_file}
    return {split: read_file(name, settings.encoding) for split, name in files.items() if name}


def _common(folder: Path, meta: dict[str, Any], model_config: Any) -> dict[str, Any]:
    """A prepared folder -> the fields of `Prepared`."""
    buckets = LengthBuckets.of_model(model_config)
    splits = {name: tokens.load_split(folder, name, buckets) for name in meta["splits"]}
    return {
        "folder": folder,
        "digest": folder.name,
        "text_column": meta["text_column"],
        "text_pair": meta.get("text_pair"),
        "max_length": meta["max_length"],
        "notes": tuple(meta["notes"]),
        "train": splits["train"],
        "validation": splits["validation"],
        "test": splits.get("test"),
    }


def _make(
    draft: Path,
    tables: dict[str, Table],
    settings: TextSettings,
    find: FindTargets,
    tokenizer: Any,
    max_length: int,
    seed: int,
) -> None:
    """Checks every split before any is tokenized, and writes them to `draft`."""
    notes: list[str] = []
    targets, chosen = _choose(tables, settings, find, tokenizer, seed, notes)
    note_overlap(chosen, notes)
    for split, rows in chosen.items():
        arrays, cut = tokens.encode(tokenizer, rows.texts, max_length, f"tokens of {split}", rows.pairs)
        _check_known(tokens.unknown_share(tokenizer, arrays["input_ids"]), split, notes)
        if cut:
            share = 100 * cut / len(rows.texts)
            notes.append(f"{split}: {share:.1f} % of the texts are cut at {max_length} tokens (--max_length)")
        own = targets.arrays(split, rows.targets, tokenizer, notes)
        everything = {**arrays, **own, "rows": rows.numbers.astype(np.int64)}
        kept: dict[str, Sequence[str] | None] = {}
        if split != "train":  # for reports
            kept = {"texts": rows.texts, "pairs": rows.pairs, "titles": targets.written(rows.targets)}
        tokens.save_split(draft / split, everything, **kept)
    meta = {
        "labels": targets.to_json(),
        "text_column": text_column(tables["train"], settings.text_column),
        "text_pair": _asked_pair(settings),
        "max_length": max_length,
        "notes": notes,
        "splits": list(chosen),
    }
    (draft / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")


def _asked_pair(settings: TextSettings) -> str | None:
    return settings.text_pair if isinstance(settings, DataSettings) else None


def _usable(table: Table, column: str, settings: TextSettings, tokenizer: Any, notes: list[str]) -> Rows:
    """The rows that are neither empty nor too short."""
    pair = pair_column(table, _asked_pair(settings), column)
    rows = usable_rows(table, column, pair, settings.drop_empty_text, notes)
    return rows if settings.min_length is None else long_enough(rows, settings.min_length, tokenizer, notes)


def _choose(
    tables: dict[str, Table],
    settings: TextSettings,
    find: FindTargets,
    tokenizer: Any,
    seed: int,
    notes: list[str],
) -> tuple[Targets, dict[str, Rows]]:
    """(what is learned, the rows of each split that take part)."""
    column = text_column(tables["train"], settings.text_column)
    train = _usable(tables["train"], column, settings, tokenizer, notes)
    targets = find(tables["train"], column, train.numbers)
    if "test" in tables and targets.all_missing(tables["test"]):
        notes.append(f"{tables['test'].name} has no labels: it is left out (`toolkit predict` labels it)")
        tables = {split: table for split, table in tables.items() if split != "test"}
    chosen: dict[str, Rows] = {}
    for split, table in tables.items():
        rows = train if split == "train" else _usable(table, column, settings, tokenizer, notes)
        if settings.drop_empty_text:
            rows = with_targets(rows, targets, notes)
        chosen[split] = replace(rows, targets=targets.encode(table, rows.numbers))
    if "validation" not in chosen:
        chosen = {**hold_back(chosen.pop("train"), targets, settings.validation_split, seed, notes), **chosen}
    most = {"train": settings.max_train_samples}
    return targets, {
        split: sampled(rows, split, most.get(split, settings.max_eval_samples), seed, notes)
        for split, rows in chosen.items()
    }


def _check_known(unknown: float, split: str, notes: list[str]) -> None:
    """Texts in a language the model cannot read would train, to nothing. Raises UserError then."""
    said = f"{split}: {100 * unknown:.0f} % of the tokens are unknown to this model's tokenizer"
    if unknown > MOST_UNKNOWN:
        raise UserError(f"{said}: choose a --model_name_or_path that reads the language of these texts")
    if unknown > MENTION_UNKNOWN:
        notes.append(f"{said}: does it read the language of these texts?")
