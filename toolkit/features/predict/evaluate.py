"""`toolkit evaluate MODEL FILE`: metrics, predictions and a report of a saved model on labelled
rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.config import TaskSettings, build, flat
from toolkit.data.tokens import Split, join_pair
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation, classification_metrics
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.saved_model import choose_labels, training_run
from toolkit.features.predict.job import Job, empty_rows, sibling
from toolkit.objective.losses import sample_losses
from toolkit.report.files import RunFiles
from toolkit.report.html import write_report
from toolkit.report.record import Record
from toolkit.report.summary import class_lines
from toolkit.utils.features import features
from toolkit.utils.files import as_json, explain_write_errors, replace_folder


def evaluate_file(options: Any) -> None:
    """Writes a folder with eval.jsonl, predictions.jsonl, config.json and report.html like those of
    a run; each row is evaluated exactly once. A collective.

    `options` holds the arguments of `toolkit evaluate`. Raises UserError for a model or file that
    cannot be read, a row with no label or a label that the model does not have, and an output that
    exists."""
    out = Path(options.output_dir or sibling(Path(options.file), ".evaluation"))
    if out.exists():
        raise UserError(
            f"{out} exists: remove it, or name another folder with --output_dir"
        )
    job = Job(options, options.label_column)
    saved, table = job.saved, job.table
    if not isinstance(saved.answers, ClassAnswers):
        remedy = "the recipe that trained it evaluates a --test_file"
        raise UserError(f"{options.model} is no classifier: {remedy}")
    labels = choose_labels(options.model, table, options.label_column, saved.answers.labels)
    answers = replace(saved.answers, labels=labels)
    text_columns, label_columns = " and ".join(job.columns), ", ".join(labels.columns)
    job.log(f"reading the text from {text_columns}, the label from {label_columns}")
    encoded = labels.encode(table)
    texts = saved.read_texts(table, job.columns)
    job.warn_of_empty(empty_rows(texts), len(encoded))
    job.load_model()
    split = saved.tokenize(texts, job.identity)
    split = replace(split, name=Path(options.file).name, labels=encoded)
    logits = saved.compute_outputs(split)
    saved.remove_tokens(job.identity)
    if not job.accelerator.is_main_process:
        return
    evaluation = _evaluation(answers, split, logits)
    with explain_write_errors(out), replace_folder(out) as folder:
        lines = _write_folder(job, folder, evaluation, answers)
        rows = list(map(join_pair, *texts))
        write_report(Record.load(folder), rows, name=out.resolve().name)
    print(f"{len(split)} rows: {evaluation}")
    for line in [*class_lines(evaluation), *answers.describe(evaluation), *lines]:
        print(line)
    print(f"  {out}/report.html, predictions.jsonl, eval.jsonl")


def _evaluation(answers: ClassAnswers, split: Split, logits: np.ndarray) -> Evaluation:
    """As a recipe evaluates, with the plain loss: no class weights or other options of training.
    `logits`: (N, C)."""
    labels = answers.labels
    compute_metrics = partial(classification_metrics, labels=labels)
    truth = torch.from_numpy(split.labels)
    losses = sample_losses(torch.from_numpy(logits), truth, labels.problem_type)  # (N,)
    numbers = {
        "num_samples": len(split),
        "loss": float(losses.double().mean()),
        **compute_metrics(logits, split.labels),
    }
    lines = partial(ClassAnswers(labels).prediction_lines, split.rows, logits, split.labels)
    outputs = (split, logits)
    evaluation = Evaluation(split.name, as_json(numbers), lines, outputs, compute_metrics)
    return answers.evaluation(evaluation, compute_metrics)


def _write_folder(
    job: Job, folder: Path, evaluation: Evaluation, answers: ClassAnswers
) -> list[str]:
    """Writes a run's files and those of features, and returns the features' lines to print."""
    files = RunFiles(job.accelerator, folder)
    model = job.options.model
    given = {"model_name_or_path": model}
    given["language"] = training_run(model)["settings"].get("language", "en")
    settings: Any = build(TaskSettings, given)
    # invalid as settings: there is no train_file
    values = {"settings": {**flat(settings), "test_file": job.options.file}}
    data = {
        **answers.labels.facts(),
        **answers.labels.source(),
        "text_column": " and ".join(job.columns),
        "samples": {evaluation.split: len(job.table)},
        "max_length": job.max_length,
        "digest": job.table.digest,
        "file_digests": {evaluation.split: job.table.digest},
        "total_steps": 0,
        "metric_for_best_model": answers.labels.usual_metric,
    }
    files.write_config(settings, data, values)
    files.append_evaluation(evaluation, 0)
    files.write_predictions(evaluation)
    results = (folder, settings, None, evaluation, answers)
    return [line for feature in features() for line in feature.results(*results)]
