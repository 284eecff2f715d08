"""`toolkit evaluate MODEL FILE`: metrics, predictions and a report of a saved model on labelled rows."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from toolkit.features.predict.command import read_settings, sibling
from toolkit.objective.losses import sample_losses
from toolkit.pretrained import model_digest
from toolkit.report.files import RunFiles
from toolkit.report.html import write_report
from toolkit.report.log import class_lines
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
    if not isinstance(saved.answers, ClassAnswers):
        remedy = "the recipe that trained it evaluates a --test_file"
        raise UserError(f"{options.model} is no classifier: {remedy}")
    table = read_file(options.file, read_settings(options))
    text, pair = choose_columns(
        options.model, table, options.text_column, options.text_pair, options.label_column
    )
    labels = _labels_of(options, table, text, saved.answers.labels)
    line = f"reading the text from {text}, the label from {', '.join(labels.columns)}"
    launch.log_on_main(accelerator, line)
    max_length = saved.choose_max_length(options.max_length, pair is not None)
    facts = {
        "file": table.digest,
        "rows": len(table),
        "columns": ", ".join(filter(None, [text, pair, *labels.columns])),
        "tokens": max_length,
        "model": model_digest(options.model),
    }
    launch.require_equal(accelerator, "the file, the model and the options", facts)
    saved.load(accelerator, max_length, options.per_device_batch_size, options.max_tokens_per_batch)
    texts = saved.read_texts(table, text)
    pairs = saved.read_texts(table, pair) if pair else None
    split = saved.tokenize(texts, pairs, json.dumps(facts))
    split = replace(split, name=Path(options.file).name, labels=labels.encode(table))
    logits = saved.compute_outputs(split)
    if logits is None:
        return
    answers = replace(saved.answers, labels=labels)
    evaluation = _evaluate(split, logits, answers)
    data = {
        **labels.facts(),
        "samples": {split.name: len(split)},
        "text_column": text,
        "max_length": max_length,
        "digest": table.digest,
        "file_digests": {split.name: table.digest},
        "notes": [],
        "total_steps": 0,
    }
    _warn_of_empty(texts, pairs)
    if pairs:
        texts = list(map(join_pair, texts, pairs))
    with replace_folder(out, options.overwrite) as draft:
        files = RunFiles(accelerator, draft)
        settings: Any = build(TaskSettings, {"model_name_or_path": options.model})
        # invalid as settings: there is no train_file
        files.write_config(
            settings, data, {"settings": {**flat(settings), "test_file": options.file}}
        )
        files.append_evaluation(evaluation, 0)
        files.write_predictions(evaluation)
        results = (draft, settings, None, evaluation, answers)
        lines = [line for feature in features() for line in feature.results(*results)]
        write_report(draft, evaluation, texts, name=out.resolve().name)
    print(f"{len(split)} rows: {evaluation}")
    for line in [*class_lines(evaluation), *answers.describe(evaluation), *lines]:
        print(line)
    print(f"  {out}/report.html, predictions.jsonl, eval.jsonl")


def _labels_of(options: Any, table: Table, text: str, labels: Labels) -> Labels:
    """The model's labels with their columns in this file. Raises UserError if it has none."""
    column = options.label_column or training_run(options.model)["settings"].get("label_column")
    chosen = choose_labels(options.model, table, column, labels)
    if chosen is None:
        others = [name for name in table.rows.column_names if name != text]
        raise table.ambiguous_column("label", "label_column", others)
    return chosen


def _warn_of_empty(*texts: list[str] | None) -> None:
    """Names the rows in which a text is empty."""
    columns = [column for column in texts if column]
    rows = enumerate(zip(*columns, strict=True))
    empty = [row for row, parts in rows if not all(map(str.strip, parts))]
    if empty:
        logger.warning(empty_text_warning(empty, len(columns[0])))


def _output_folder(options: Any) -> Path:
    out = Path(options.output_dir or sibling(Path(options.file), ".evaluation"))
    if out.exists() and not options.overwrite:
        raise UserError(f"{out} exists: name another folder with --output_dir, or pass --overwrite")
    if out.exists() and not _is_evaluation(out):
        fault = "has other files, which --overwrite would remove"
        raise UserError(f"{out} {fault}: name another folder")
    existing_parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not os.access(existing_parent, os.W_OK):
        remedy = "name another folder with --output_dir"
        raise UserError(f"{existing_parent} cannot be written: {remedy}")
    return out


def _is_evaluation(out: Path) -> bool:
    """Whether the folder is empty, or looks like one that `toolkit evaluate` has written."""
    if not out.is_dir():
        return False
    names = {path.name for path in out.iterdir()}
    return not names or ("eval.jsonl" in names and "metrics.jsonl" not in names)


def _evaluate(split: Split, logits: np.ndarray, answers: ClassAnswers) -> Evaluation:
    """Evaluates on the main process, with the plain loss: no class weights or other options of training."""
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
