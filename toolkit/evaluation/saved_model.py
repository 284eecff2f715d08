"""A saved model, loaded for prediction."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from transformers.utils import cached_file

from toolkit.config import ModelSettings
from toolkit.config.sections import default_tokens_per_batch
from toolkit.data.encode import split_of_texts
from toolkit.data.labels import USUAL, Labels
from toolkit.data.read import format_of
from toolkit.data.table import Table
from toolkit.data.tokenizer import choose_max_length, fingerprint, load_tokenizer, separator_of
from toolkit.data.tokens import Split
from toolkit.errors import listing
from toolkit.evaluation.answers import Answers, answers_for
from toolkit.evaluation.outputs import ReportProgress
from toolkit.launch import log_on_main
from toolkit.launch.precision import autocast
from toolkit.pretrained import load_config
from toolkit.utils.cache import digest_of_text

COLUMNS = "training_columns"
"""The key in tokenizer_config.json, which transformers saves and does not interpret: the columns of
the training file, for a model that is no longer in its run's folder."""
_PARTS = ("settings", "data", "identity", "launch")


def training_run(name: str) -> dict[str, Any]:
    """`settings`, `data`, `identity` and `launch` in config.json of the run that trained this
    model. Without it (an exported, converted or copied model, or one from the hub) `data` has the
    columns alone, and the others are empty."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        # strict: a hub name must not count as a folder next to some run's config.json
        file = Path(name).resolve(strict=True).parent / "config.json"
        run = json.loads(file.read_text(encoding="utf-8"))
        return {part: dict(run[part]) for part in _PARTS}
    return {"settings": {}, "data": _saved_columns(name), "identity": {}, "launch": {}}


def _saved_columns(name: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        file = cached_file(
            name,
            "tokenizer_config.json",
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
        )
        return dict(json.loads(Path(str(file)).read_text(encoding="utf-8"))[COLUMNS])
    return {}


def training_quoting(name: str, file: str) -> Literal["csv", "none"]:
    """The `--quoting` that the model was trained with, if the training file has the format of
    `file`: with another the texts would silently differ in their double quotes."""
    run = training_run(name)
    settings = run["settings"] or run["data"]
    formats = Path(str(settings.get("train_file")).lower()).suffixes
    if format_of(Path(file)) in formats and settings.get("quoting") == "none":
        return "none"
    return "csv"


def choose_columns(
    name: str, table: Table, text: str | None, pair: str | None, label: str | None = None
) -> tuple[str, str | None]:
    """The columns of texts and of second texts: `text` and `pair`, or else those that the model was
    trained on; for texts one that is neither `label` nor usual for labels. Raises UserError if one
    is missing or unclear."""
    run = training_run(name)["data"]
    pair = pair or run.get("text_pair")
    trained = str(run.get("text_column") or "")
    # a missing one is an error below
    if not text and set(table.columns_of(trained)) & set(table.rows.column_names):
        text = trained
    others = [*table.find_columns(label, USUAL, "label_column"), pair]
    column = table.text_column(text, others)
    return column, table.pair_column(pair, column)


def choose_labels(name: str, table: Table, column: str | None, labels: Labels) -> Labels | None:
    """The model's labels with their columns and format in this file, by default as in training;
    None if it has no label column. Raises UserError."""
    run = training_run(name)["data"]
    trained = run.get("label_columns", [])
    if not column and set(trained) <= set(table.rows.column_names):
        column = ",".join(trained) or None
    columns = table.find_columns(column, USUAL, "label_column")
    if not columns:
        return None
    labels = labels.in_columns(table, columns)
    if len(columns) > 1:
        return labels
    return replace(labels, separator=run.get("label_separator"))


def empty_text_warning(rows: Sequence[int], count: int) -> str:
    """A warning about `rows` (from 0) of `count`, whose text, or one text of a pair, is empty; ""
    without rows."""
    if not rows:
        return ""
    where = listing(row + 1 for row in rows)
    return f"{len(rows)} of {count} rows have an empty text (rows {where}): meaningless predictions"


class SavedModel:
    """A model's config, tokenizer and `Answers`; `load` adds its weights."""

    def __init__(self, name: str) -> None:
        """Raises UserError for a model that cannot be loaded."""
        self.settings = ModelSettings(model_name_or_path=name)
        self.config = load_config(self.settings)
        self.tokenizer = load_tokenizer(self.settings)
        self.answers: Answers = answers_for(name, self.config)
        self._shared: set[Path] = set()
        """Cache folders that `tokenize` has filled for all ranks."""

    def choose_max_length(self, max_length: int | None, pairs: bool = False) -> int:
        """Tokens per text. Raises UserError if the model cannot read so many."""
        return choose_max_length(max_length, self.tokenizer, self.config, pairs)

    def load(
        self,
        accelerator: Accelerator,
        max_length: int,
        per_device_batch_size: int,
        max_tokens: int | None,
    ) -> None:
        # under FSDP accelerate does not move it
        model = self.answers.load(self.settings).to(accelerator.device)
        device = accelerator.device.type
        if next(model.parameters(), None) is None:  # another runtime's
            device = "cpu"
            if accelerator.mixed_precision != "no":
                precision = accelerator.mixed_precision
                line = f"an exported model computes in its own precision, not in {precision}"
                log_on_main(accelerator, line)
        self.accelerator = accelerator
        self.config = model.config
        self.max_length = max_length
        self._sizes = (per_device_batch_size, max_tokens or default_tokens_per_batch(device, 16384))
        self.model = accelerator.prepare_model(model, evaluation_mode=True)

    @cached_property
    def _fingerprint(self) -> str:
        return f"{fingerprint(self.tokenizer)} {self.tokenizer.model_input_names}"

    def read_texts(self, table: Table, column: str) -> list[str]:
        blocks = table.text_blocks([column], separator_of(self.tokenizer))
        return [text for (texts,) in blocks for text in texts]

    def tokenize(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, facts: str | None = None
    ) -> Split:
        """`facts` identify these texts in the cache, so that several processes share the
        tokenizing."""
        shared_as = None
        if facts and self.accelerator.num_processes > 1:
            shared_as = digest_of_text(f"{facts} {self.max_length} {self._fingerprint}")
        split = split_of_texts(
            "texts", self.tokenizer, self.config, self.max_length, texts, pairs, shared_as
        )
        if shared_as is not None:
            self._shared.add(split.folder.parent)
        return split

    def compute_outputs(self, split: Split, report: ReportProgress | None = None) -> Any:
        """The outputs for a whole split on the main process, None on the others; a collective. It
        removes the split's tokens from the cache."""
        with autocast(self.accelerator):
            outputs = self.answers.outputs(
                self.accelerator, self.model, split, self.tokenizer, *self._sizes, report
            )
        folder = split.folder.parent
        if folder in self._shared and self.accelerator.is_local_main_process:
            shutil.rmtree(folder)  # every process has mapped its files by now
            Path(f"{folder}.lock").unlink(missing_ok=True)
        return outputs
