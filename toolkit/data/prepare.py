"""Files or hub -> one folder of tokens and labels per machine, named after everything it depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataSettings, ProblemType, TaskSettings
from toolkit.data import demo, tokens
from toolkit.data.cache import made_once
from toolkit.data.labels import Labels, find_labels
from toolkit.data.read import Table, find_column, read_file, read_hub
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAYOUT = 1  # raise when what a prepared folder holds changes
MENTION_UNKNOWN, MOST_UNKNOWN = 0.02, 0.5  # parts of all tokens
USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "文本", "内容", "评论", "正文")


@dataclass(frozen=True)
class TaskData:
    """Everything a recipe needs of its data; the arrays are mapped from `folder`."""

    folder: Path
    digest: str
    labels: Labels
    max_length: int
    notes: tuple[str, ...]
    """Lines worth telling the user: sizes, cut texts, overlaps."""
    train: Split
    validation: Split
    test: Split | None


def prepare_data(
    settings: TaskSettings, tokenizer: Any, model_config: Any, accelerator: Accelerator | None = None
) -> TaskData:
    """Tokens and labels of a task, made by one process per machine, loaded by all.

    Who comes second waits on a file lock, not in a collective, so that no time limit of the process
    group counts. Raises UserError for every fault of the input, and when machines hold other data.
    """
    data, problem_type, seed = settings.data, settings.model.problem_type, settings.training.seed
    tables = read_tables(data)
    tokens.refuse_foreign_tokenizer(tokenizer, model_config)
    max_length = tokens.choose_max_length(data.max_length, tokenizer, model_config)
    asked = {
        "layout": _LAYOUT,
        "tables": {split: table.digest for split, table in tables.items()},
        "tokenizer": tokens.fingerprint(tokenizer),
        "max_length": max_length,
        "problem_type": problem_type,
        "seed": seed,
        **{name: getattr(data, name) for name in
           ("text_column", "label_column", "drop_empty_text", "validation_split")},
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
    folder = made_once(
        "tokens",
        digest,
        lambda draft: _make(draft, tables, data, tokenizer, max_length, problem_type, seed),
        accelerator,
    )
    return load(folder)


def prepare_texts(
    table: Table, column: str, tokenizer: Any, max_length: int, accelerator: Accelerator | None = None
) -> Split:
    """Tokens of every row of a table, without labels (all 0), made once per machine."""
    asked = [_LAYOUT, table.digest, column, tokens.fingerprint(tokenizer), max_length]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]

    def make(draft: Path) -> None:
        texts = ["" if text is None else str(text) for text in table.rows[column]]
        arrays, _ = tokens.encode(tokenizer, texts, max_length, progress="tokens")
        rows = np.arange(len(texts), dtype=np.int64)
        tokens.save_split(draft / "texts", {**arrays, "rows": rows, "labels": np.zeros(len(texts), np.int64)}, None)
        (draft / "meta.json").write_text("{}", encoding="utf-8")

    return tokens.load_split(made_once("tokens", digest, make, accelerator), "texts")


def read_tables(settings: DataSettings) -> dict[str, Table]:
    """The splits that were named: `train` and perhaps `validation` and `test`. Raises UserError."""
    if settings.dataset_name:
        name = settings.dataset_name
        found = demo.read_demo(name) if name.startswith(demo.PREFIX) else read_hub(name, settings.dataset_config_name)
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


def load(folder: Path) -> TaskData:
    """A prepared folder -> its splits, mapped into memory."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    splits = {name: tokens.load_split(folder, name) for name in meta["splits"]}
    return TaskData(
        folder=folder,
        digest=folder.name,
        labels=Labels.from_json(meta["labels"]),
        max_length=meta["max_length"],
        notes=tuple(meta["notes"]),
        train=splits["train"],
        validation=splits["validation"],
        test=splits.get("test"),
    )


def _make(
    draft: Path,
    tables: dict[str, Table],
    settings: DataSettings,
    tokenizer: Any,
    max_length: int,
    problem_type: ProblemType | None,
    seed: int,
) -> None:
    """Checks every split before any is tokenized, and writes them to `draft`."""
    column = text_column(tables["train"], settings.text_column)
    notes: list[str] = []
    kept = usable_texts(tables["train"], column, settings.drop_empty_text, [])[1]
    labels = find_labels(tables["train"], settings.label_column, problem_type, column, kept)
    chosen: dict[str, tuple[Table, list[str], np.ndarray, np.ndarray]] = {}
    if "test" in tables and labels.all_missing(tables["test"]):
        notes.append(f"{tables['test'].name} has no labels: it is left out (`toolkit predict` labels it)")
        tables = {split: table for split, table in tables.items() if split != "test"}
    for split, table in tables.items():
        texts, kept = usable_texts(table, column, settings.drop_empty_text, notes)
        chosen[split] = (table, texts, kept, labels.encode(table, kept))
    if "validation" not in chosen:
        chosen = {**_hold_back(chosen.pop("train"), labels, settings.validation_split, seed, notes), **chosen}
    _note_overlap(chosen, notes)
    for split, (_, texts, kept, encoded) in chosen.items():
        arrays, cut = tokens.encode(tokenizer, texts, max_length, progress=f"tokens of {split}")
        _check_known(tokens.unknown_share(tokenizer, arrays["input_ids"]), split, notes)
        if cut:
            share = 100 * cut / len(texts)
            notes.append(f"{split}: {share:.1f} % of the texts are cut at {max_length} tokens (--max_length)")
        everything = {**arrays, "labels": encoded, "rows": kept.astype(np.int64)}
        tokens.save_split(draft / split, everything, None if split == "train" else texts)
    meta = {"labels": asdict(labels), "max_length": max_length, "notes": notes, "splits": list(chosen)}
    (draft / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")


def _check_known(unknown: float, split: str, notes: list[str]) -> None:
    """Texts in a language the model cannot read would train, to nothing. Raises UserError then."""
    said = f"{split}: {100 * unknown:.0f} % of the tokens are unknown to this model's tokenizer"
    if unknown > MOST_UNKNOWN:
        raise UserError(f"{said}: choose a --model_name_or_path that reads the language of these texts")
    if unknown > MENTION_UNKNOWN:
        notes.append(f"{said}: does it read the language of these texts?")


def text_column(table: Table, wanted: str | None) -> str:
    """The column to read. Raises UserError when it cannot be told."""
    column = find_column(table, wanted, USUAL_TEXT, "text_column")
    if column is not None:
        return column
    strings = [name for name, feature in table.rows.features.items() if _is_string(feature)]
    if len(strings) == 1:
        return strings[0]
    raise UserError(
        f"{table.name}: which column is the text? Name one of {listing(table.rows.column_names)} with --text_column"
    )


def usable_texts(table: Table, column: str, drop_empty: bool, notes: list[str]) -> tuple[list[str], np.ndarray]:
    """(texts, their row numbers from 0). Raises UserError naming the rows whose text is empty."""
    if column not in table.rows.column_names:
        raise UserError(f"{table.name} has no text column {column!r}: it has {listing(table.rows.column_names)}")
    texts = ["" if text is None else str(text) for text in table.rows[column]]
    empty = [row for row, text in enumerate(texts) if not text.strip()]
    if len(empty) == len(texts):
        raise UserError(f"{table.name}: every text in column {column!r} is empty: name another with --text_column")
    if empty and not drop_empty:
        rows = listing(row + 1 for row in empty)
        raise UserError(
            f"{table.name}: the text in column {column!r} is empty in {len(empty)} of {len(texts)} rows (rows {rows}): "
            "fill them, or pass --drop_empty_text"
        )
    if empty:
        notes.append(f"{table.name}: {len(empty)} rows with an empty text are left out")
    dropped = set(empty)
    kept = np.array([row for row in range(len(texts)) if row not in dropped], np.int64)
    return [texts[row] for row in kept], kept


def _hold_back(
    train: tuple[Table, list[str], np.ndarray, np.ndarray],
    labels: Labels,
    share: float,
    seed: int,
    notes: list[str],
) -> dict[str, Any]:
    """Divides training rows into `train` and `validation`, by class where there are classes."""
    from sklearn.model_selection import train_test_split  # a second's import, needed once

    table, texts, kept, encoded = train
    places = np.arange(len(texts))
    strata = None
    singles = places[:0]
    if labels.problem_type == "single_label_classification":
        counts = np.bincount(encoded, minlength=labels.size)
        alone = counts[encoded] < 2  # a class of one row can only be trained on
        singles, places, strata = places[alone], places[~alone], encoded[~alone]
    held = max(1, round(len(places) * share))
    if held >= len(places):
        raise UserError(
            f"{table.name}: {len(texts)} rows are too few to hold a part of {share:g} back for validation: give "
            "--validation_file, or another --validation_split"
        )
    if strata is not None and min(held, len(places) - held) < len(set(strata)):
        strata = None
        notes.append(f"{table.name}: too few rows to hold some of each class back")
    train_places, validation_places = train_test_split(places, test_size=held, random_state=seed, stratify=strata)
    parts = {
        "train": np.sort(np.concatenate([train_places, singles])),
        "validation": np.sort(validation_places),
    }
    notes.append(
        f"{table.name}: {len(parts['validation'])} of {len(texts)} rows are held back for validation "
        f"(--validation_split {share:g}, seed {seed})"
    )
    return {
        split: (table, [texts[place] for place in chosen], kept[chosen], encoded[chosen])
        for split, chosen in parts.items()
    }


def _note_overlap(chosen: dict[str, Any], notes: list[str]) -> None:
    train = set(chosen["train"][1])
    for split in ("validation", "test"):
        texts: Sequence[str] = chosen[split][1] if split in chosen else ()
        seen = sum(text in train for text in texts)
        if seen:
            notes.append(f"{split}: {seen} of {len(texts)} texts also stand in training: their scores flatter")


def _is_string(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")
