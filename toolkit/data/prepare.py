"""Files or hub -> one folder of tokens and targets per machine, named after everything it depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit import launch
from toolkit.cache import made_once
from toolkit.config import Task, TaskSettings, TitleSettings, flat
from toolkit.data import rows as selection
from toolkit.data import tokens
from toolkit.data.labels import Labels, find_labels
from toolkit.data.read import Table, read_tables
from toolkit.data.rows import Rows, Targets, text_column, texts_of
from toolkit.data.titles import Titles, find_titles
from toolkit.data.tokens import Split
from toolkit.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

_LAYOUT = 2  # raise when what a prepared folder holds changes
MENTION_UNKNOWN, MOST_UNKNOWN = 0.02, 0.5  # parts of all tokens


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

    def find(table: Table, column: str, kept: np.ndarray) -> Labels:
        return find_labels(table, data.label_column, problem_type, column, kept)

    asked = {"problem_type": problem_type, "label_column": data.label_column}
    if data.text_pair is not None:
        asked["text_pair"] = data.text_pair
    job = _Job(settings, tokenizer, model_config, find, data.text_pair)
    loaded, targets = job.prepared(asked, accelerator)
    return TaskData(**loaded, labels=Labels.from_json(targets))


def prepare_titles(
    settings: TitleSettings, tokenizer: Any, model_config: Any, accelerator: Accelerator | None = None
) -> TitleData:
    """Tokens of texts and of their titles; otherwise as `prepare_data`."""
    data = settings.data
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        raise UserError(f"{settings.model.model_name_or_path}: its tokenizer has no tokens that begin and end a title")

    def find(table: Table, column: str, kept: np.ndarray) -> Titles:
        return find_titles(table, data.title_column, column, data.max_target_length)

    asked = {"title_column": data.title_column, "max_target_length": data.max_target_length}
    loaded, targets = _Job(settings, tokenizer, model_config, find).prepared(asked, accelerator)
    return TitleData(**loaded, titles=Titles(**targets))


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

    def make(draft: Path) -> None:
        texts, pairs = texts_of(table, column), texts_of(table, pair) if pair else None
        arrays, _ = tokens.encode(tokenizer, texts, max_length, progress="tokens", pairs=pairs)
        rows = np.arange(len(texts), dtype=np.int64)
        tokens.save_split(draft / "texts", {**arrays, "rows": rows, "labels": np.zeros(len(texts), np.int64)})

    asked = [_LAYOUT, table.digest, column, tokens.fingerprint(tokenizer), max_length, *([pair] if pair else [])]
    folder = made_once("tokens", _digest(asked), make, accelerator, f"{table.name} (to predict)")
    return tokens.load_split(folder, "texts", model_config)


def _digest(asked: Any) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]


@dataclass
class _Job:
    """What one job's tokens are made of."""

    settings: TaskSettings | TitleSettings
    tokenizer: Any
    model_config: Any
    find: Callable[[Table, str, np.ndarray], Targets]
    """The training table, its text column, the rows that are used -> what is learned."""
    pair: str | None = None
    notes: list[str] = field(default_factory=list)

    def prepared(self, more: dict[str, Any], accelerator: Accelerator | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the fields of `Prepared`, the targets). The folder's name is the digest of `more` and everything else it
        depends on; a seed only where rows are drawn."""
        if accelerator is not None:  # paths may differ between machines: what the files hold is compared below
            local = Path(str(self.settings.data.dataset_name)).is_dir()
            paths = ("train_file", "validation_file", "test_file", "model_name_or_path", *["dataset_name"] * local)
            values = {name: value for name, value in flat(self.settings).items() if name not in paths}
            launch.same_everywhere(accelerator, "the settings", values)
        data, tables = self.settings.data, read_tables(self.settings.data)
        tokens.refuse_foreign_tokenizer(self.tokenizer, self.model_config)
        self.max_length = tokens.choose_max_length(
            data.max_length, self.tokenizer, self.model_config, self.pair is not None
        )
        self.seed = self.settings.training.seed if data.data_seed is None else data.data_seed
        limits = {name: value for name in ("min_length", "max_train_samples", "max_eval_samples")
                  if (value := getattr(data, name)) is not None}  # fmt: skip
        drawn = "validation" not in tables or data.max_train_samples or data.max_eval_samples
        asked = {
            "layout": _LAYOUT,
            "max_length": self.max_length,
            **({"seed": self.seed} if drawn else {}),
            **{name: getattr(data, name) for name in ("text_column", "drop_empty_text", "validation_split")},
            **limits,
            **more,
        }
        digests = {split: table.digest for split, table in tables.items()}
        kind = tokens.fingerprint(self.tokenizer)
        if accelerator is not None:  # before an hour of work on what is not the same
            content = {f"the content of the {split} data": digest[:12] for split, digest in digests.items()}
            launch.same_everywhere(accelerator, "the data", {**content, **asked, "the tokenizer": kind[:12]})
        digest = _digest({**asked, "tables": digests, "tokenizer": kind})
        source = ", ".join(table.name for table in tables.values())
        folder = made_once("tokens", digest, lambda draft: self._make(draft, tables), accelerator, source)
        return self._load(folder)

    def _load(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        splits = {name: tokens.load_split(folder, name, self.model_config) for name in meta["splits"]}
        notes = list(meta["notes"])
        if self.pair and not tokens.tells_pairs_apart(self.model_config):
            notes.append("this model has one token type: a separator alone tells the two texts of a pair apart")
        loaded = {
            "folder": folder, "digest": folder.name, "text_column": meta["text_column"], "text_pair": self.pair,
            "max_length": self.max_length, "notes": tuple(notes), "train": splits["train"],
            "validation": splits["validation"], "test": splits.get("test"),
        }  # fmt: skip
        return loaded, meta["labels"]

    def _make(self, draft: Path, tables: dict[str, Table]) -> None:
        """Checks every split before any is tokenized, and writes them to `draft`."""
        column = text_column(tables["train"], self.settings.data.text_column)
        targets, chosen = self._choose(tables, column)
        selection.note_overlap(chosen, self.notes)
        for split, rows in chosen.items():
            arrays, cut = tokens.encode(self.tokenizer, rows.texts, self.max_length, f"tokens of {split}", rows.pairs)
            self._check_known(split, arrays["input_ids"])
            if cut:
                share = 100 * cut / len(rows.texts)
                self.notes.append(
                    f"{split}: {share:.1f} % of the texts are cut at {self.max_length} tokens (--max_length)"
                )
            own = targets.arrays(split, rows.targets, self.tokenizer, self.notes)
            kept: dict[str, Sequence[str] | None] = {}
            if split != "train":  # for reports
                kept = {"texts": rows.texts, "pairs": rows.pairs, "titles": targets.written(rows.targets)}
            tokens.save_split(draft / split, {**arrays, **own, "rows": rows.numbers.astype(np.int64)}, **kept)
        meta = {"labels": asdict(targets), "text_column": column, "notes": self.notes, "splits": list(chosen)}
        (draft / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")

    def _choose(self, tables: dict[str, Table], column: str) -> tuple[Targets, dict[str, Rows]]:
        """(what is learned, the rows of each split that take part)."""
        data, notes = self.settings.data, self.notes
        train = self._usable(tables["train"], column)
        targets = self.find(tables["train"], column, train.numbers)
        chosen: dict[str, Rows] = {}
        for split, table in tables.items():
            if split == "test" and targets.all_missing(table):
                notes.append(f"{table.name} has no labels: it is left out (`toolkit predict` labels it)")
                continue
            rows = train if split == "train" else self._usable(table, column)
            if data.drop_empty_text:
                rows = selection.with_targets(rows, targets, notes)
            chosen[split] = replace(rows, targets=targets.encode(table, rows.numbers))
        if "validation" not in chosen:
            held = selection.hold_back(chosen.pop("train"), targets, data.validation_split, self.seed, notes)
            chosen = {**held, **chosen}
        most = {split: data.max_train_samples if split == "train" else data.max_eval_samples for split in chosen}
        sampled = selection.sampled
        return targets, {split: sampled(rows, split, most[split], self.seed, notes) for split, rows in chosen.items()}

    def _usable(self, table: Table, column: str) -> Rows:
        """The rows that are neither empty nor too short."""
        data = self.settings.data
        pair = selection.pair_column(table, self.pair, column)
        rows = selection.usable_rows(table, column, pair, data.drop_empty_text, self.notes)
        if data.min_length is None:
            return rows
        return selection.long_enough(rows, data.min_length, self.tokenizer, self.notes)

    def _check_known(self, split: str, input_ids: np.ndarray) -> None:
        """Texts in a language the model cannot read would train, to nothing. Raises UserError then."""
        unknown = float(np.mean(input_ids == self.tokenizer.unk_token_id)) if len(input_ids) else 0.0
        said = f"{split}: {100 * unknown:.0f} % of the tokens are unknown to this model's tokenizer"
        if unknown > MOST_UNKNOWN:
            raise UserError(f"{said}: choose a --model_name_or_path that reads the language of these texts")
        if unknown > MENTION_UNKNOWN:
            self.notes.append(f"{said}: does it read the language of these texts?")
