"""`toolkit evaluate MODEL FILE`: a saved model on labelled rows: metrics, predictions, and a page of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit import launch
from toolkit.config import PretrainedSettings, TaskSettings, build, flat
from toolkit.data.labels import MULTI, USUAL, Labels, find_labels, read_class_names
from toolkit.data.parse import format_of
from toolkit.data.read import Table, find_columns, read_file
from toolkit.data.rows import texts_of
from toolkit.data.tokens import Split, separator_of
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation, classification_metrics, decided_evaluation
from toolkit.evaluation.classification import prediction_lines
from toolkit.evaluation.saved_model import SavedModel, run_of
from toolkit.features.baselines.baselines import FILE, write_baselines
from toolkit.features.decisions.decisions import Decisions, lines_of
from toolkit.features.predict.command import columns_read, reading
from toolkit.objective.losses import sample_losses
from toolkit.pretrained import layer_of
from toolkit.report.files import RunFiles
from toolkit.report.html import write_report
from toolkit.report.log import class_lines
from toolkit.utils.cache import digest_of_text, remove
from toolkit.utils.files import as_json, replace_folder

_OURS = {"config.json", "eval.jsonl", "predictions.jsonl", "report.html", FILE}


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
    if saved.decisions is None:
        raise UserError(f"{options.model} writes titles: recipes/title.py --test_file judges them")
    decisions, table = saved.decisions, read_file(options.file, reading(options))
    column, pair = columns_read(options, table)
    labels = _labels_in(table, decisions.labels, options, column)
    truth = labels.encode(table, np.arange(len(table)))
    max_length = saved.length(options.max_length, pair is not None)
    facts = {"file": table.digest, "rows": len(table), "columns": [column, pair, *labels.columns], "tokens": max_length}
    launch.same_everywhere(accelerator, "the file and the options", facts)
    saved.load(accelerator, max_length, options.per_device_batch_size, options.max_tokens_per_batch)
    split, texts = _split_of(saved, table, column, pair, digest_of_text(json.dumps(facts)))
    split = replace(split, name=Path(options.file).name, labels=truth)
    logits = saved.outputs(split)
    if split.folder != Path() and accelerator.is_local_main_process:
        remove(split.folder.parent)
    if logits is None:
        return
    evaluation = _evaluation_of(split, logits, replace(decisions, labels=labels))
    with replace_folder(out, options.overwrite) as draft:
        files = RunFiles(accelerator, draft)
        settings: Any = build(TaskSettings, {"model_name_or_path": options.model})
        judged = {"settings": flat(settings) | {"test_file": options.file}}  # no file of settings has it alone
        data = {**labels.facts(), "samples": {split.name: len(split)}, "text_column": column, "max_length": max_length,
                "digest": table.digest, "notes": [], "total_steps": 0}  # fmt: skip
        files.write_config(settings, accelerator, data, judged)
        files.append_evaluation(evaluation, 0)
        files.write_predictions(evaluation)
        ranges = write_baselines(draft, None, (split, logits), replace(decisions, labels=labels))
        write_report(draft, evaluation, texts)
    for line in [f"{len(split)} rows: {evaluation}", *ranges, *class_lines(evaluation), *lines_of(evaluation)]:
        print(line)
    print(f"  {out}/report.html, predictions.jsonl, eval.jsonl")


def _folder_of(options: Any) -> Path:
    source = Path(options.file)
    kind = format_of(source)
    out = Path(options.output_dir or source.with_name(f"{source.name[: -len(kind)]}.evaluation"))
    if out.exists() and not options.overwrite:
        raise UserError(f"{out} exists: name another folder with --output_dir, or pass --overwrite")
    if out.exists() and (not out.is_dir() or not {path.name for path in out.iterdir()} <= _OURS):
        raise UserError(f"{out} holds more than an evaluation, and --overwrite would remove it: name another folder")
    return out


def _labels_in(table: Table, labels: Labels, options: Any, column: str) -> Labels:
    """The model's labels, and where and how they stand in this file: as in the model's run, where it was one."""
    run = run_of(options.model)["settings"]
    wanted = options.label_column or run.get("label_column")
    columns = find_columns(table, wanted, USUAL, "label_column")
    if not columns:
        raise table.which("label", "label_column", [name for name in table.rows.column_names if name != column])
    multi_hot = labels.problem_type == MULTI and find_labels(table, ",".join(columns), MULTI, column).multi_hot
    names = run.get("label_names_file")
    values = () if multi_hot or not names or not Path(names).is_file() else tuple(read_class_names(names))
    return replace(labels, columns=columns, multi_hot=multi_hot, values=values)


def _split_of(saved: SavedModel, table: Table, column: str, pair: str | None, name: str) -> tuple[Split, list[str]]:
    """(the rows' tokens, their texts)."""
    separator = separator_of(saved.tokenizer)
    texts, pairs = (
        [text for block in texts_of(table, own, separator) for text in block] if own else None for own in (column, pair)
    )
    assert texts is not None
    several = saved.accelerator.num_processes > 1  # they share the work of tokenizing
    split = saved.split(texts, pairs, name if several else None)
    return split, [f"{text}\n{second}" for text, second in zip(texts, pairs, strict=True)] if pairs else texts


def _evaluation_of(split: Split, logits: np.ndarray, decisions: Decisions) -> Evaluation:
    """On the main process; the loss is without what a run may weight it with."""
    labels = decisions.labels

    def compute_metrics(own: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
        return classification_metrics(own, truth, labels)

    losses = sample_losses(torch.from_numpy(logits), torch.from_numpy(split.labels), labels.problem_type)
    numbers = {"num_samples": len(split), "loss": float(losses.double().mean())}
    numbers |= as_json(compute_metrics(logits, split.labels))
    plain = Evaluation(
        split.name, numbers, lambda: prediction_lines(split.rows, logits, split.labels, decisions), (split, logits)
    )
    return plain if decisions == Decisions(labels) else decided_evaluation(plain, decisions, compute_metrics)
