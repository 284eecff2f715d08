"""`toolkit evaluate MODEL FILE`: metrics, predictions and a report of a saved model on labelled
rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from toolkit import launch
from toolkit.config import TaskSettings, build, flat
from toolkit.data.labels import Labels
from toolkit.data.read import read_file
from toolkit.data.table import Table
from toolkit.data.tokens import Split, join_pair
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation, classification_metrics
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.saved_model import (
    SavedModel,
    choose_columns,
    choose_labels,
    empty_text_warning,
    training_run,
)
from toolkit.features.predict.command import (
    empty_rows,
    read_settings,
    require_writable,
    sibling,
)
from toolkit.objective.losses import sample_losses
from toolkit.pretrained import model_digest
from toolkit.report.files import RunFiles
from toolkit.report.html import write_report
from toolkit.report.record import Record
from toolkit.report.summary import class_lines
from toolkit.utils.features import features
from toolkit.utils.files import as_json, replace_folder
from toolkit.utils.log import logger


def evaluate_file(options: Any) -> None:
    """Writes a folder with eval.jsonl, predictions.jsonl, config.json and report.html like those of
    a run; each row is evaluated exactly once. A collective.

    `options` holds the arguments of `toolkit evaluate`. Raises UserError for a model or file that
    cannot be read, a row with no label or a label that the model does not have, and an output that
    exists."""
    out = _output_folder(options)
    saved = SavedModel(options.model)
    accelerator = launch.make_accelerator(options.mixed_precision)
    rows = _read_rows(options, saved)
    line = f"reading the text from {rows.text}, the label from {', '.join(rows.labels.columns)}"
    launch.log_on_main(accelerator, line)
    facts = rows.facts(options.model)
    launch.require_equal(accelerator, "the file, the model and the options", facts)
    sizes = (options.per_device_batch_size, options.max_tokens_per_batch)
    saved.load(accelerator, rows.max_length, *sizes)
    texts = saved.read_texts(rows.table, rows.text)
    pairs = saved.read_texts(rows.table, rows.pair) if rows.pair else None
    split = saved.tokenize(texts, pairs, json.dumps(facts))
    name = Path(options.file).name
    split = replace(split, name=name, labels=rows.labels.encode(rows.table))
    logits = saved.compute_outputs(split)
    if logits is None:
        return
    columns = [column for column in (texts, pairs) if column]
    empty = empty_rows(list(zip(*columns, strict=True)))
    if empty:
        logger.warning(empty_text_warning(empty, len(texts)))
    if pairs:
        texts = list(map(join_pair, texts, pairs))
    evaluation = _evaluate(split, logits, rows.answers)
    lines = _write_folder(out, options, accelerator, rows, evaluation, texts)
    print(f"{len(split)} rows: {evaluation}")
    for line in [*class_lines(evaluation), *rows.answers.describe(evaluation), *lines]:
        print(line)
    print(f"  {out}/report.html, predictions.jsonl, eval.jsonl")


@dataclass(frozen=True)
class _Rows:
    """A labelled file, and which of its columns are read."""

    table: Table
    text: str
    pair: str | None
    answers: ClassAnswers
    """The model's, with the columns of labels in this file."""
    max_length: int

    @property
    def labels(self) -> Labels:
        return self.answers.labels

    def facts(self, model: str) -> dict[str, Any]:
        """What all processes must agree on."""
        return {
            "file": self.table.digest,
            "rows": len(self.table),
            "columns": ", ".join(filter(None, [self.text, self.pair, *self.labels.columns])),
            "tokens": self.max_length,
            "model": model_digest(model),
        }

    def data(self, split: str) -> dict[str, Any]:
        """`data` of a run's config.json."""
        return {
            **self.labels.facts(),
            "samples": {split: len(self.table)},
            "text_column": self.text,
            "max_length": self.max_length,
            "digest": self.table.digest,
            "file_digests": {split: self.table.digest},
            "notes": [],
            "total_steps": 0,
        }


def _read_rows(options: Any, saved: SavedModel) -> _Rows:
    """Raises UserError for a file without texts or labels of the model."""
    if not isinstance(saved.answers, ClassAnswers):
        remedy = "the recipe that trained it evaluates a --test_file"
        raise UserError(f"{options.model} is no classifier: {remedy}")
    table = read_file(options.file, read_settings(options))
    text, pair = choose_columns(
        options.model, table, options.text_column, options.text_pair, options.label_column
    )
    labels = _labels_of(options, table, text, saved.answers.labels)
    max_length = saved.choose_max_length(options.max_length, pair is not None)
    return _Rows(table, text, pair, replace(saved.answers, labels=labels), max_length)


def _write_folder(
    out: Path,
    options: Any,
    accelerator: Accelerator,
    rows: _Rows,
    evaluation: Evaluation,
    texts: list[str],
) -> list[str]:
    """Returns the features' lines to print."""
    settings: Any = build(TaskSettings, {"model_name_or_path": options.model})
    # invalid as settings: there is no train_file
    values = {"settings": {**flat(settings), "test_file": options.file}}
    with replace_folder(out) as draft:
        files = RunFiles(accelerator, draft)
        files.write_config(settings, rows.data(evaluation.split), values)
        files.append_evaluation(evaluation, 0)
        files.write_predictions(evaluation)
        results = (draft, settings, None, evaluation, rows.answers)
        lines = [line for feature in features() for line in feature.results(*results)]
        write_report(Record.load(draft), texts, name=out.resolve().name)
    return lines


def _labels_of(options: Any, table: Table, text: str, labels: Labels) -> Labels:
    """The model's labels with their columns in this file. Raises UserError if it has none."""
    column = options.label_column or training_run(options.model)["settings"].get("label_column")
    chosen = choose_labels(options.model, table, column, labels)
    if chosen is None:
        others = [name for name in table.rows.column_names if name != text]
        raise table.ambiguous_column("label", "label_column", others)
    return chosen


def _output_folder(options: Any) -> Path:
    out = Path(options.output_dir or sibling(Path(options.file), ".evaluation"))
    if out.exists():
        raise UserError(f"{out} exists: remove it, or name another folder with --output_dir")
    require_writable(out, "--output_dir")
    return out


def _evaluate(split: Split, logits: np.ndarray, answers: ClassAnswers) -> Evaluation:
    """Evaluates on the main process, with the plain loss: no class weights or other options of
    training."""
    compute_metrics = partial(classification_metrics, labels=answers.labels)
    losses = sample_losses(
        torch.from_numpy(logits), torch.from_numpy(split.labels), answers.labels.problem_type
    )
    numbers = {"num_samples": len(split), "loss": float(losses.double().mean())}
    numbers |= as_json(compute_metrics(logits, split.labels))
    lines = partial(answers.prediction_lines, split.rows, logits, split.labels)
    return answers.evaluation(
        Evaluation(split.name, numbers, lines, (split, logits)), compute_metrics
    )
