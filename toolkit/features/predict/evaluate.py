"""`toolkit evaluate MODEL FILE`: a saved model on labelled rows: metrics, predictions, and a page of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit import launch
from toolkit.config import PretrainedSettings, TaskSettings, build, flat
from toolkit.data.labels import MULTI, USUAL, Labels, find_labels
from toolkit.data.read import format_of, read_class_names, read_file
from toolkit.data.table import Table, find_columns, texts_of
from toolkit.data.tokens import Split, separator_of
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation, classification_metrics
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.saved_model import SavedModel, empty_text_warning, training_run
from toolkit.features.predict.command import columns_read, reading
from toolkit.objective.losses import sample_losses
from toolkit.pretrained import layer_of
from toolkit.report.files import RunFiles
from toolkit.report.html import write_report
from toolkit.report.log import class_lines
from toolkit.utils.features import features, write_results
from toolkit.utils.files import as_json, replace_folder
from toolkit.utils.log import logger

_FILES = {"config.json", "eval.jsonl", "predictions.jsonl", "report.html"}


def evaluate_file(options: Any) -> None:
    """Writes a folder with eval.jsonl, predictions.jsonl, config.json and report.html, as a run's are; every row counts
    once, in one process or many. All processes call it.

    `options` holds the arguments of `toolkit evaluate`. Raises UserError for a model or file that cannot be read, a row
    without a label or with one that the model does not know, and an output that exists.
    """
    out = _folder_of(options)
    accelerator = launch.make_accelerator(
        options.mixed_precision, layer_of(PretrainedSettings(model_name_or_path=options.model))
    )
    saved = SavedModel(options.model)
    if not isinstance(saved.answers, ClassAnswers):
        raise UserError(f"{options.model} is no classifier: the recipe that trained it evaluates a --test_file")
    table = read_file(options.file, reading(options))
    column, pair = columns_read(options, table)
    labels = _labels_in(table, saved.answers.labels, options, column)
    answers = replace(saved.answers, labels=labels)
    truth = labels.encode(table, np.arange(len(table)))
    max_length = saved.choose_max_length(options.max_length, pair is not None)
    facts = {"file": table.digest, "rows": len(table), "columns": [column, pair, *labels.columns], "tokens": max_length}
    launch.require_equal(accelerator, "the file and the options", facts)
    saved.load(accelerator, max_length, options.per_device_batch_size, options.max_tokens_per_batch)
    split, texts = _split_of(saved, table, column, pair, json.dumps(facts))
    split = replace(split, name=Path(options.file).name, labels=truth)
    logits = saved.compute_outputs(split)
    if logits is None:
        return
    if note := empty_text_warning([row for row, text in enumerate(texts) if not text.strip()], len(texts)):
        logger.warning(note)
    evaluation = _evaluation_of(split, logits, answers)
    with replace_folder(out, options.overwrite) as draft:
        files = RunFiles(accelerator, draft)
        settings: Any = build(TaskSettings, {"model_name_or_path": options.model})
        more = {"settings": flat(settings) | {"test_file": options.file}}  # settings cannot have it alone
        data = {**labels.facts(), "samples": {split.name: len(split)}, "text_column": column, "max_length": max_length,
                "digest": table.digest, "notes": [], "total_steps": 0}  # fmt: skip
        files.write_config(settings, accelerator, data, more)
        files.append_evaluation(evaluation, 0)
        files.write_predictions(evaluation)
        lines = write_results(draft, settings, None, evaluation, answers)
        write_report(draft, evaluation, texts)
    effect = answers.describe(evaluation)
    print("\n".join([f"{len(split)} rows: {evaluation}", *class_lines(evaluation), *effect, *lines]))
    print(f"  {out}/report.html, predictions.jsonl, eval.jsonl")


def _folder_of(options: Any) -> Path:
    source = Path(options.file)
    kind = format_of(source)
    out = Path(options.output_dir or source.with_name(f"{source.name[: -len(kind)]}.evaluation"))
    if out.exists() and not options.overwrite:
        raise UserError(f"{out} exists: name another folder with --output_dir, or pass --overwrite")
    files = _FILES.union(*(feature.files for feature in features()))
    if out.exists() and (not out.is_dir() or not {path.name for path in out.iterdir()} <= files):
        raise UserError(f"{out} holds more than an evaluation, and --overwrite would remove it: name another folder")
    return out


def _labels_in(table: Table, labels: Labels, options: Any, column: str) -> Labels:
    """The model's labels, and where and how they stand in this file: as in the model's run, where it was one."""
    run = training_run(options.model)["settings"]
    name = options.label_column or run.get("label_column")
    columns = find_columns(table, name, USUAL, "label_column")
    if not columns:
        others = [name for name in table.rows.column_names if name != column]
        raise table.ambiguous_column("label", "label_column", others)
    multi_hot = labels.problem_type == MULTI and find_labels(table, ",".join(columns), MULTI, column).multi_hot
    file = run.get("label_names_file")
    values = () if multi_hot or not file or not Path(file).is_file() else tuple(read_class_names(file))
    return replace(labels, columns=columns, multi_hot=multi_hot, values=values)


def _split_of(saved: SavedModel, table: Table, column: str, pair: str | None, facts: str) -> tuple[Split, list[str]]:
    """(the rows' tokens, their texts)."""
    separator = separator_of(saved.tokenizer)
    texts, pairs = (
        [text for block in texts_of(table, each, separator) for text in block] if each else None
        for each in (column, pair)
    )
    assert texts is not None
    split = saved.tokenize(texts, pairs, facts)
    return split, [f"{text}\n{second}" for text, second in zip(texts, pairs, strict=True)] if pairs else texts


def _evaluation_of(split: Split, logits: np.ndarray, answers: ClassAnswers) -> Evaluation:
    """On the main process; the loss is without what a run may weight it with."""
    labels = answers.labels

    def compute_metrics(outputs: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
        return classification_metrics(outputs, truth, labels)

    losses = sample_losses(torch.from_numpy(logits), torch.from_numpy(split.labels), labels.problem_type)
    numbers = {"num_samples": len(split), "loss": float(losses.double().mean())}
    numbers |= as_json(compute_metrics(logits, split.labels))
    lines = partial(answers.prediction_lines, split.rows, logits, split.labels)
    return answers.evaluation(Evaluation(split.name, numbers, lines, (split, logits)), compute_metrics)
