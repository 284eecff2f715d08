"""A saved model, loaded for prediction; which columns of a file it reads."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from pydantic import TypeAdapter
from transformers.utils import cached_file

from toolkit.config import ModelSettings, TextSettings
from toolkit.config.sections import default_tokens_per_batch
from toolkit.data.columns import (
    USUAL_LABELS,
    USUAL_TEXT,
    find_columns,
    find_texts,
    has_usual,
    require_columns,
)
from toolkit.data.labels import Labels
from toolkit.data.options import REMEMBERED
from toolkit.data.read import files_of
from toolkit.data.table import Table
from toolkit.data.text_files import delimiter_of, first_lines, format_of, undecodable_lines
from toolkit.data.tokenizer import (
    choose_max_length,
    load_tokenizer,
    separator_of,
)
from toolkit.data.tokens import Split
from toolkit.errors import UserError, explain_errors
from toolkit.evaluation.answers import Answers, answers_for
from toolkit.evaluation.outputs import BatchSizes
from toolkit.evaluation.self_test import Loaded, check_self_test, folder_of
from toolkit.launch.precision import autocast
from toolkit.pretrained import load_config, refuse_foreign_tokenizer
from toolkit.utils.cache import digest_of_text
from toolkit.utils.files import cache_folder, read_json_object
from toolkit.utils.log import log_on_rank_0

_COLUMNS = TypeAdapter(dict[str, str | list[str] | None])
COLUMNS = "training_columns"
"""The key in tokenizer_config.json, which transformers saves and does not interpret: the columns of
the training file. A copied, converted or exported model has them, too."""


def training_run(name: str) -> dict[str, Any]:
    """`settings` and `data` of the run in whose folder this model is; empty if there is none."""
    run = {}
    with contextlib.suppress(OSError, UserError):
        # strict: a hub name must not count as a folder next to some run's config.json
        run = read_json_object(Path(name).resolve(strict=True).parent / "config.json")
    sections = {key: run.get(key) for key in ("settings", "data")}
    if all(isinstance(each, dict) for each in sections.values()):
        return sections
    return {"settings": {}, "data": {}}


def training_columns(name: str) -> dict[str, Any]:
    """`text_column`, `text_pair`, `label_columns` and how their cells are read, in the file that
    the model was trained on; {} if it was not trained by a recipe. Raises UserError for values of
    other types."""
    file = None
    with contextlib.suppress(OSError, ValueError):
        file = cached_file(name, "tokenizer_config.json", local_files_only=True)
    if file is None:
        return {}
    with explain_errors(f"{file}, {COLUMNS}"):
        return _COLUMNS.validate_python(read_json_object(Path(file)).get(COLUMNS, {}))


def fitting_settings(name: str, file: str, text_column: str | None) -> dict[str, Any]:
    """Those of the settings with which the model's training file was read that fit a file: of the
    same format; an encoding if the file is not in UTF-8; a delimiter that its first line has; names
    of columns if that line is no header with the column of texts. Raises UserError for values of
    another type."""
    trained = training_columns(name)
    path = files_of(file)[0]
    suffixes = Path(str(trained.get("train_file", "")).lower()).suffixes
    if not path.is_file() or format_of(path) not in suffixes:
        return {}
    fitting = {each: trained[each] for each in REMEMBERED if each in trained}
    if "encoding" in fitting and not undecodable_lines(path, "utf-8")[1]:
        del fitting["encoding"]
    with explain_errors(f"{name}/tokenizer_config.json, {COLUMNS}"):
        settings = TextSettings(**fitting)
    header = "".join(first_lines(path, settings, 1))
    delimiter = delimiter_of(path, settings)
    is_text = False
    if delimiter not in header:
        fitting.pop("delimiter", None)
        is_text = format_of(path) == ".txt"
        delimiter = ","
    cells = header.split(delimiter or None)
    text_columns = (text_column or trained["text_column"]).lower().split(",")
    if is_text or has_usual(cells, (*text_columns, *USUAL_TEXT)):
        fitting.pop("column_names", None)
    return fitting


def choose_columns(
    name: str, table: Table, text: str | None, pair: str | None, label: str | None = None
) -> list[str]:
    """The column of texts, and that of second texts if there is one: `text` and `pair`, or else
    those that the model was trained on; for texts one that is neither `label` nor usual for labels.
    Raises UserError if one is missing or unclear."""
    trained = training_columns(name)
    pair = pair or trained.get("text_pair")
    trained_text = trained.get("text_column", "")
    # a missing one is an error below
    if not text and set(table.columns_of(trained_text)) & set(table.rows.column_names):
        text = trained_text
    others = find_columns(table, label, "label_column", USUAL_LABELS)
    return list(find_texts(table, text, pair, others))


def choose_labels(name: str, table: Table, column: str | None, labels: Labels) -> Labels:
    """The model's labels with their columns and format in this file, by default as in training.
    Raises UserError if it has no label column."""
    trained = training_columns(name)
    columns = trained.get("label_columns", [])
    if not column and set(columns) <= set(table.rows.column_names):
        column = ",".join(columns) or None
    columns = require_columns(table, column, "label_column", USUAL_LABELS)
    labels = labels.in_columns(table, columns)
    if len(columns) > 1:
        return labels
    return replace(labels, separator=trained.get("label_separator"))


class SavedModel:
    """A model's config, tokenizer and `Answers`; `load` adds its weights."""

    def __init__(self, name: str) -> None:
        """Raises UserError for a model that cannot be loaded."""
        self.settings = ModelSettings(model_name_or_path=name)
        self.config = load_config(self.settings)
        self.tokenizer = load_tokenizer(self.settings)
        refuse_foreign_tokenizer(self.tokenizer, self.config)
        self.answers: Answers = answers_for(name, self.config)

    def choose_max_length(self, max_length: int | None, pairs: bool = False) -> int:
        """Tokens per text. Raises UserError if the model cannot read so many."""
        return choose_max_length(max_length, self.tokenizer, self.config, pairs)

    def load(
        self,
        accelerator: Accelerator,
        max_length: int,
        per_device_batch_size: int,
        max_tokens: int | None,
        self_test: str = "error",
    ) -> None:
        """`self_test`: the mode of `check_self_test`. Raises UserError for a model that cannot be
        loaded, or answers otherwise than when it was saved."""
        # under FSDP accelerate does not move it
        model = self.answers.load(self.settings).to(accelerator.device)
        device = accelerator.device.type
        if next(model.parameters(), None) is None:  # another runtime's
            device = "cpu"
            if accelerator.mixed_precision != "no":
                precision = accelerator.mixed_precision
                line = (
                    f"an exported model computes in its own precision, not in {precision}"
                )
                log_on_rank_0(line)
        folder = folder_of(str(self.settings.model_name_or_path))
        loaded = Loaded(folder, self.tokenizer, self.config, model)
        with autocast(accelerator):
            check_self_test(loaded, self_test, accelerator.mixed_precision)
        self.accelerator = accelerator
        self.config = model.config
        self.max_length = max_length
        max_tokens = max_tokens or default_tokens_per_batch(device, 16384)
        self.sizes = BatchSizes(per_device_batch_size, max_tokens)
        self.model = accelerator.prepare_model(model, evaluation_mode=True)

    def read_texts(self, table: Table, columns: Sequence[str]) -> list[list[str]]:
        """The texts of each column."""
        blocks = table.read(columns, separator_of(self.tokenizer)).texts()
        return [list(chain.from_iterable(parts)) for parts in zip(*blocks, strict=True)]

    def tokenize(
        self, columns: Sequence[Sequence[str]], identity: str | None = None
    ) -> Split:
        """Texts, or first and second texts, as a split. With `identity`, a description of these
        texts, the model and `max_length`, one of several processes tokenizes for all of its
        machine, into the cache; the caller ends with `remove_tokens`."""
        shared_as = None
        if identity and self.accelerator.num_processes > 1:
            shared_as = digest_of_text(identity)
        options = (self.tokenizer, self.config, self.max_length)
        return self.answers.split(*options, columns, shared_as)

    def compute_outputs(self, split: Split) -> Any:
        """The outputs for a whole split on the main process, None on the others; a collective."""
        sizes = (self.sizes.per_device, self.sizes.max_tokens)
        with autocast(self.accelerator):
            return self.answers.outputs(
                self.accelerator, self.model, split, self.tokenizer, *sizes
            )

    def remove_tokens(self, identity: str) -> None:
        """Removes the files of `tokenize`, after a collective: all processes have read them."""
        folder = cache_folder() / "tokens" / digest_of_text(identity)
        if folder.is_dir() and self.accelerator.is_local_main_process:
            shutil.rmtree(folder)
            Path(f"{folder}.lock").unlink(missing_ok=True)
