"""What `toolkit predict` and `toolkit evaluate` begin with: a file, a model, and processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit import __version__, launch
from toolkit.data.columns import header_notes
from toolkit.data.options import reading_settings
from toolkit.data.read import read_file, replacement_notes
from toolkit.data.text_files import format_of
from toolkit.errors import listing
from toolkit.evaluation.saved_model import (
    SavedModel,
    choose_columns,
    fitting_settings,
    training_columns,
)
from toolkit.pretrained import model_digest
from toolkit.utils.log import log_on_rank_0


class Job:
    """The rows of a file, the model for them, and what identifies both."""

    def __init__(self, options: Any, label_column: str | None = None) -> None:
        """`options`: the arguments of the command. Raises UserError for a model or a file that
        cannot be read, and for processes with different ones."""
        self.options = options
        fitting = fitting_settings(options.model, options.file, options.text_column)
        self.settings = reading_settings(options, **fitting)
        self.accelerator = launch.make_accelerator(options.mixed_precision)
        used = [name for name in fitting if getattr(options, name) is None]
        if used:
            listed = [f"--{name} {fitting[name]!r}" for name in used]
            self.log(f"the file is read as in training: {' '.join(listed)}")
        self.table = read_file(options.file, self.settings)
        self.saved = SavedModel(options.model)
        self.columns = choose_columns(
            options.model, self.table, options.text_column, options.text_pair, label_column
        )
        pairs = len(self.columns) > 1
        self.max_length = self.saved.choose_max_length(options.max_length, pairs)
        named = (options.text_column, training_columns(options.model).get("text_column"))
        notes = list(replacement_notes(self.table, self.settings))
        if self.columns[0] not in named:
            notes.extend(header_notes(self.table, self.columns[0]))
        for line in notes:
            self.log(line)
        self.facts = {
            "toolkit": __version__,
            "file": self.table.digest,
            "rows": len(self.table),
            "model": model_digest(options.model),
            "columns": ", ".join(self.columns),
            "max_length": self.max_length,
            "precision": self.accelerator.mixed_precision,
        }
        self.identity = json.dumps(self.facts)
        launch.require_equal("the file, the model and the options", self.facts)

    def load_model(self) -> None:
        sizes = (self.options.per_device_batch_size, self.options.max_tokens_per_batch)
        self_test = self.options.self_test
        self.saved.load(self.accelerator, self.max_length, *sizes, self_test)

    def warn_of_empty(self, rows: Sequence[int], count: int) -> None:
        """`rows`: the `empty_rows` of `count`."""
        if rows:
            where = listing(row + 1 for row in rows)
            self.log(f"{len(rows)} of {count} rows have an empty text (rows {where})")

    def log(self, line: str) -> None:
        """Prints a line, on one process."""
        log_on_rank_0(line)


def empty_rows(columns: Sequence[Sequence[str]]) -> list[int]:
    """The rows (from 0) whose text, or one text of a pair, is empty."""
    rows = enumerate(zip(*columns, strict=True))
    return [row for row, texts in rows if not all(map(str.strip, texts))]


def sibling(source: Path, ending: str) -> Path:
    """`rows.csv.gz`, `.evaluation` -> `rows.evaluation`, in the same folder."""
    stem = source.name[: source.name.lower().rindex(format_of(source))]
    return source.with_name(stem + ending)
