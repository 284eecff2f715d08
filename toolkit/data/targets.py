"""What a model learns to predict: the base class of a task's targets, which its settings name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toolkit.config import TaskSettings
from toolkit.data.batches import Collator
from toolkit.data.encode import encode_blocks
from toolkit.data.read import read_tables
from toolkit.data.table import Table
from toolkit.data.token_files import save_texts, save_tokens
from toolkit.data.tokenizer_check import spelling_notes
from toolkit.data.tokens import Split
from toolkit.data.unknown import unknown_notes


def targets_of(settings: Any) -> type[Targets]:
    """The class that `targets`, a class variable of a recipe's settings, names as `MODULE:CLASS`;
    labels without it."""
    module, _, name = getattr(settings, "targets", TaskSettings.targets).partition(":")
    targets: type[Targets] = getattr(importlib.import_module(module), name)
    return targets


@dataclass(frozen=True)
class Targets:
    """What a model learns to predict from a text: `toolkit.data.labels.Labels`, or a feature's
    subclass."""

    column_setting: ClassVar[str | None]
    """The setting that names their column; None if they need only the text."""
    usual_columns: ClassVar[tuple[str, ...]]
    """Common names of that column."""
    reads_objects: ClassVar[bool] = False
    """Whether that column may hold lists of objects."""
    split_class: ClassVar[type[Split]] = Split
    """The class that a prepared split is loaded as."""
    pipeline_tag: ClassVar[str] = "text-classification"
    """The hub's and transformers' name of the task, for the model card."""

    @property
    def usual_metric(self) -> str:
        """The default of `--metric_for_best_model`."""
        return "loss"

    @classmethod
    def collator(cls, settings: Any) -> Any:
        """The subclass of `Collator`, or a function like it, that makes the batches."""
        return Collator

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        """Raises UserError for a tokenizer that cannot encode them."""

    @classmethod
    def tables(cls, settings: Any) -> dict[str, Table]:
        """The splits that the settings name, as `find` reads them. Raises UserError."""
        return read_tables(settings.data)

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        """The settings that prepared data depend on. JSON."""
        raise NotImplementedError

    @classmethod
    def find(cls, settings: Any, table: Table, columns: tuple[str, ...]) -> Targets:
        """Infers the targets from their columns in the training table. Raises UserError if they are
        ambiguous."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, loaded: dict[str, Any]) -> Targets:
        """The inverse of `dataclasses.asdict`."""
        fields = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in loaded.items()
        }
        return cls(**fields)

    @classmethod
    def first_loss_note(cls, settings: Any, tokenizer: Any, loss: float) -> str | None:
        """A line for the user if the loss of the first step is not a pretrained model's."""

    def facts(self) -> dict[str, Any]:
        """What must be equal in a checkpoint and the run that resumes from it. JSON."""
        raise NotImplementedError

    def source(self) -> dict[str, Any]:
        """Where the file has them, for the run's config.json. JSON."""
        return {}

    def describe(self) -> str:
        """A line for the user."""
        raise NotImplementedError

    def encode(self, table: Table) -> np.ndarray:
        """(samples, ...): the targets of the rows; zeros if `save` computes them. Raises UserError
        naming a row."""
        return np.zeros(len(table), np.int64)

    def missing(self, table: Table) -> np.ndarray:
        """(samples,) bool: the rows without targets; all if the table lacks the column, as test
        splits of many hub data sets do."""
        return np.zeros(len(table), bool)

    def strata(self, encoded: np.ndarray) -> np.ndarray | None:
        """(samples,) the class of each sample, for a stratified validation split; None if there are
        no classes."""

    def write(
        self,
        folder: Path,
        table: Table,
        encoded: np.ndarray,
        tokenizer: Any,
        max_length: int,
    ) -> list[str]:
        """Writes the tokens of a split, a sample for each text, and its targets. Returns notes."""
        notes = list(write_tokens(folder, table, tokenizer, max_length))
        return notes + self.save(folder, table, encoded, tokenizer)

    def save(
        self, folder: Path, table: Table, encoded: np.ndarray, tokenizer: Any
    ) -> list[str]:
        """Writes a split's targets next to its tokens: `labels.npy`, and other files that its
        `split_class` reads. Returns notes."""
        np.save(folder / "labels.npy", encoded)
        return []


def write_tokens(
    folder: Path, table: Table, tokenizer: Any, max_length: int
) -> Iterator[str]:
    """Writes the tokens of a split, and yields notes on them."""
    split = folder.name
    texts = table.texts()
    if split != "train":  # for reports
        texts = save_texts(folder / "texts.jsonl", texts)
    blocks = encode_blocks(tokenizer, texts, max_length, len(table), f"tokens of {split}")
    counts = save_tokens(folder, blocks, unknown=tokenizer.unk_token_id)
    np.save(folder / "rows.npy", table.row_numbers)
    yield from unknown_notes(split, counts, table, tokenizer)
    if split == "train":
        yield from spelling_notes(table, tokenizer)
    if counts.truncated:
        share = f"{100 * counts.truncated / len(table):.1f} %"
        yield f"{split}: {share} of the texts are cut at {max_length} tokens (--max_length)"
