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
from toolkit.data.read import read_file
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
    """Writes a folder with eval.jsonl, predictions.jsonl, config.json and report.html like those of a run; each row is
    evaluated exactly once. A collective.

    `options` holds the arguments of `toolkit evaluate`. Raises UserError for a model or file that cannot be read, a row
    with no label or a label that the model does not have, and an output that exists.
    """
    out = _output_folder(options)
    saved = SavedModel(options.model)
    accelerator = launch.make_accelerator(options.mixed_precision)
    if not isinstance(saved.answers, ClassAnswers):
        raise UserError(
            f"{options.model} is no classifier: the recipe that trained it evaluates a --test_file"
        )
    table = read_file(options.file, read_settings(options))
    column, pair = choose_columns(
        options.model, table, options.text_column, options.text_pair, options.label_column
    )
    trained_on = training_run(options.model)["settings"].get("label_column")
    labels = choose_labels(
        options.model, table, options.label_column or trained_on, saved.answers.labels
    )
    if labels is None:
        others = [name for name in table.rows.column_names if name != column]
        raise table.ambiguous_column("label", "label_column", others)
    launch.log_on_main(
        accelerator, f"reading the text from {column}, the label from {', '.join(labels.columns)}"
    )
    answers = replace(saved.answers, labels=labels)
    truth = labels.encode(table)
    max_length = saved.choose_max_length(options.max_length, pair is not None)
    facts = {"file": table.digest, "rows": len(table), "columns": [column, pair, *labels.columns], "tokens": max_length,
             "model": model_digest(options.model)}  # fmt: skip
    launch.require_equal(accelerator, "the file, the model and the options", facts)
    saved.load(accelerator, max_length, options.per_device_batch_size, options.max_tokens_per_batch)
    columns = [saved.read_texts(table, name) for name in (column, pair) if name]
    split = saved.tokenize(columns[0], columns[1] if pair else None, json.dumps(facts))
    split = replace(split, name=Path(options.file).name, labels=truth)
    logits = saved.compute_outputs(split)
    if logits is None:
        return
    texts = list(zip(*columns, strict=True))
    empty = [row for row, parts in enumerate(texts) if not all(map(str.strip, parts))]
    if empty:
        logger.warning(empty_text_warning(empty, len(texts)))
    evaluation = _evaluate(split, logits, answers)
    with replace_folder(out, options.overwrite) as draft:
        files = RunFiles(accelerator, draft)
        settings: Any = build(TaskSettings, {"model_name_or_path": options.model})
        extra = {
            "settings": flat(settings) | {"test_file": options.file}
        }  # invalid as settings: no train_file
        data = {**labels.facts(), "samples": {split.name: len(split)}, "text_column": column, "max_length": max_length,
                "digest": table.digest, "file_digests": {split.name: table.digest}, "notes": [],
                "total_steps": 0}  # fmt: skip
        files.write_config(settings, data, extra)
        files.append_evaluation(evaluation, 0)
        files.write_predictions(evaluation)
        results = (draft, settings, None, evaluation, answers)
        lines = [line for feature in features() for line in feature.results(*results)]
        shown = [join_pair(*parts) if pair else parts[0] for parts in texts]
        write_report(draft, evaluation, shown, name=out.resolve().name)
    effect = answers.describe(evaluation)
    print(
        "\n".join([f"{len(split)} rows: {evaluation}", *class_lines(evaluation), *effect, *lines])
    )
    print(f"  {out}/report.html, predictions.jsonl, eval.jsonl")


def _output_folder(options: Any) -> Path:
    out = Path(options.output_dir or sibling(Path(options.file), ".evaluation"))
    if out.exists() and not options.overwrite:
        raise UserError(f"{out} exists: name another folder with --output_dir, or pass --overwrite")
    if out.exists() and not _is_evaluation(out):
        raise UserError(
            f"{out} has other files, which --overwrite would remove: name another folder"
        )
    existing_parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not os.access(existing_parent, os.W_OK):
        raise UserError(
            f"{existing_parent} cannot be written: name another folder with --output_dir"
        )
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
