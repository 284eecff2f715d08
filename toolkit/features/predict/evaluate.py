"""`toolkit evaluate MODEL FILE`: metrics, predictions and a report of a saved model on labelled
rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config import TaskSettings, build, flat
from toolkit.data.tokens import Split, join_pair
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation, Outputs, classification_metrics
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.saved_model import SavedModel, choose_labels
from toolkit.features.predict.job import Job, empty_rows, sibling
from toolkit.launch.precision import autocast
from toolkit.objective.losses import sample_losses
from toolkit.report.files import RunFiles
from toolkit.report.html import write_report
from toolkit.report.record import Record
from toolkit.report.summary import class_lines
from toolkit.utils.features import features
from toolkit.utils.files import explain_write_errors, replace_folder


def evaluate_file(options: Any) -> None:
    """Writes a folder with eval.jsonl, predictions.jsonl, config.json and report.html like those of
    a run; each row is evaluated exactly once. A collective.

    `options` holds the arguments of `toolkit evaluate`. Raises UserError for a model or file that
    cannot be read, a row with no label or a label that the model does not have, and an output that
    exists."""
    out = Path(options.output_dir or sibling(Path(options.file), ".evaluation"))
    if out.exists():
        raise UserError(f"{out} exists: remove it, or name another folder with --output_dir")
    job = Job(options, options.label_column)
    saved, table, name = job.saved, job.table, Path(options.file).name
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
    identity = json.dumps(job.facts)
    split = replace(saved.tokenize(texts, identity), name=name, labels=encoded)
    evaluation = _evaluate(saved, split, answers)
    saved.remove_tokens(identity)
    if not job.accelerator.is_main_process:
        return
    with explain_write_errors(out), replace_folder(out) as folder:
        lines = _write_folder(job, folder, evaluation, answers)
        rows = list(map(join_pair, *texts))
        write_report(Record.load(folder), rows, name=out.resolve().name)
    print(f"{len(split)} rows: {evaluation}")
    for line in [*class_lines(evaluation), *answers.describe(evaluation), *lines]:
        print(line)
    print(f"  {out}/report.html, predictions.jsonl, eval.jsonl")


def _evaluate(saved: SavedModel, split: Split, answers: ClassAnswers) -> Evaluation:
    """As a recipe evaluates, with the plain loss: no class weights or other options of training."""
    accelerator, model, labels = saved.accelerator, saved.model, answers.labels
    plain = ClassAnswers(labels)
    outputs = Outputs(accelerator, split, saved.tokenizer, saved.sizes, plain)
    with autocast(accelerator):
        for batch in outputs.batches(model):
            logits = model(**batch.inputs).logits.float()  # (B, C)
            truth = batch.labels.to(logits.device)  # another runtime computes on the CPU
            losses = sample_losses(logits, truth, labels.problem_type)  # (B,)
            outputs.add(accelerator.gather_for_metrics((batch.ids, logits, losses)))
    evaluation = outputs.evaluation(classification_metrics)
    if evaluation.compute_metrics is None:
        return evaluation
    return answers.evaluation(evaluation, evaluation.compute_metrics)


def _write_folder(
    job: Job, folder: Path, evaluation: Evaluation, answers: ClassAnswers
) -> list[str]:
    """Writes a run's files and those of features, and returns the features' lines to print."""
    files = RunFiles(job.accelerator, folder)
    settings: Any = build(TaskSettings, {"model_name_or_path": job.options.model})
    # invalid as settings: there is no train_file
    values = {"settings": {**flat(settings), "test_file": job.options.file}}
    data = {
        **answers.labels.facts(),
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
