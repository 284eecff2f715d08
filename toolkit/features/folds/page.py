"""`--folds`: joins the out-of-fold predictions, and reports probably wrong labels."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate.utils import broadcast_object_list

from toolkit import launch
from toolkit.config import ProblemType
from toolkit.data.labels import MULTI, Labels
from toolkit.data.prepare import Prepared
from toolkit.data.tokens import length_bins
from toolkit.errors import UserError, listing
from toolkit.evaluation import Evaluation, classification_metrics
from toolkit.evaluation.outputs import ids_fault
from toolkit.features.folds.duplicates import SIMILAR, near_duplicates
from toolkit.features.folds.label_errors import Suspect, balanced_skill, find_suspects
from toolkit.features.folds.split import PART, fold_folder, fold_numbers, text_digest, unfinished
from toolkit.report.files import Record, dumps, read_lines, write_atomically
from toolkit.report.html import MIN_ROWS, worst_slices
from toolkit.report.templates import render

ERRORS = "label_errors.jsonl"
_WEAK = 0.25
"""Below this `balanced_skill`, suspects are rather mistakes of the models than wrong labels."""
_MAX_SUSPECTS, _MAX_GROUPS, _MAX_OF_GROUP, _MAX_CHOICES = 500, 50, 6, 12


def finish_fold(folder: Path, data: Prepared, evaluation: Evaluation) -> list[str]:
    """Writes the predictions for the fold's part, which completes the fold; joins all parts after the last fold, and
    otherwise starts the recipe again for the next one. A collective."""
    remaining, lines = 0, []
    if evaluation.predictions:  # on the main process
        split, fold = data.validation, data.feature_facts["fold"]
        groups = split.group_cells() or [{}] * len(split)
        rows = zip(
            evaluation.predictions(), split.texts(), split.lengths.tolist(), groups, strict=True
        )
        write_atomically(folder / PART, (
            dumps({**line, "fold": fold, "tokens": tokens, "sources": sources, "text_digest": text_digest(text),
                   "text": text}) + "\n"
            for line, text, tokens, sources in rows
        ))  # fmt: skip
        remaining = len(unfinished(folder.parent))
        lines = [f"{remaining} folds remain"] if remaining else write_folds(folder.parent)
    if broadcast_object_list([remaining])[0]:
        launch.request_rerun()
    return lines


def write_folds(folder: Path) -> list[str]:
    """Joins the parts: out_of_fold.jsonl, label_errors.jsonl and report.html. Returns lines to print.

    Raises UserError for unfinished folds, and unless each row has exactly one prediction.
    """
    if remaining := unfinished(folder):
        raise UserError(
            f"{folder}: fold {listing(remaining)} has not finished: start the same command again"
        )
    runs = [fold_folder(folder, fold) for fold in fold_numbers(folder)]
    records = [Record.load(run) for run in runs]
    lines = sorted(
        (line for run in runs for line in read_lines(run / PART)), key=lambda line: line["id"]
    )
    expected = sum(record.data["samples"]["validation"] for record in records)
    ids = np.array([line["id"] for line in lines])
    fault = ids_fault(ids, np.unique(ids))
    if fault or expected != len(lines):
        raise UserError(
            f"{folder}: not one prediction for each row ({fault or f'{len(lines)} of {expected}'})"
        )
    write_atomically(folder / "out_of_fold.jsonl", (dumps(line) + "\n" for line in lines))
    labels = Labels(
        cast(ProblemType, records[0].problem_type), tuple(records[0].data["labels"]), ()
    )
    analysis = _analysis(lines, labels)
    analysis["warnings"] += _differing_settings([record.settings for record in records])
    write_atomically(
        folder / ERRORS,
        (dumps(line) + "\n" for line in _errors(lines, analysis["suspects"], labels)),
    )
    shown = [
        _row(lines[suspect.row], suspect, labels)
        for suspect in analysis["suspects"][:_MAX_SUSPECTS]
    ]
    of_folds = [
        record.last.single_numbers for record in records
    ]  # a user's recipe may have other metrics
    names = [name for name, value in analysis["metrics"].items()
             if isinstance(value, float) and all(name in metrics for metrics in of_folds)]  # fmt: skip
    spread = {name: statistics.stdev([metrics[name] for metrics in of_folds]) for name in names}
    context = {**analysis, "record": records[0], "records": records, "folder": folder.resolve().name, "shown": shown,
               "names": names, "spread": spread, "count": len(lines), "similar": SIMILAR,
               "max_groups": _MAX_GROUPS, "max_of_group": _MAX_OF_GROUP}  # fmt: skip
    write_atomically(
        folder / "report.html", [render(Path(__file__).with_name("folds.html"), context)]
    )
    results = "  ".join(f"{name} {analysis['metrics'][name]:.4f}" for name in names)
    return [
        *analysis["warnings"],
        f"all {len(runs)} folds are done; out of fold, {len(lines)} rows: {results}",
        f"suspected labels: {len(analysis['suspects'])}, groups of near duplicates: {len(analysis['groups'])}",
        f"  {folder}/report.html         review them, and save corrections for --label_corrections FILE",
        f"  {folder}/{ERRORS}   the same labels as corrections, all accepted",
        f"  {folder}/out_of_fold.jsonl   every row with its out-of-fold probabilities",
    ]


def _differing_settings(folds: Sequence[dict[str, Any]]) -> list[str]:
    """A warning if the command has changed between folds."""
    names = {
        name for name, value in folds[0].items() if any(fold.get(name) != value for fold in folds)
    }
    names -= {"output_dir", "overwrite_output_dir"}
    return (
        [f"the folds were trained with different settings: {listing(sorted(names))}"]
        if names
        else []
    )


def _analysis(lines: Sequence[dict[str, Any]], labels: Labels) -> dict[str, Any]:
    """Metrics, suspects, groups of near duplicates and slices of all rows."""
    duplicates = _duplicates(lines)
    if labels.problem_type == "regression":
        guess, truth = (
            np.array([line[name] for line in lines]) for name in ("prediction", "label")
        )
        metrics = classification_metrics(guess.reshape(len(lines), -1), truth, labels)
        return {**duplicates, "metrics": metrics, "suspects": [], "slices": [], "warnings": []}
    probabilities = np.array([line["probabilities"] for line in lines])
    classes = {name: c for c, name in enumerate(labels.names)}
    if labels.problem_type == MULTI:
        truth, answers = (
            np.array([[name in line[key] for name in labels.names] for line in lines]).astype(float)
            for key in ("label", "prediction")
        )
        scores = probabilities - 0.5
    else:
        truth, answers = (
            np.array([classes[line[key]] for line in lines]) for key in ("label", "prediction")
        )
        scores = probabilities
    wrong = np.array([line["prediction"] != line["label"] for line in lines])
    sliced = {"length": length_bins(np.array([line["tokens"] for line in lines]))}
    # a column may have only one value, or too many, among the rows of a fold: these rows (None) are in no slice
    names = dict.fromkeys(name for line in lines for name in line["sources"])
    sliced |= {name: [line["sources"].get(name) for line in lines] for name in names}
    sliced["label"] = [
        ", ".join(line["label"]) if labels.problem_type == MULTI else line["label"]
        for line in lines
    ]
    return {
        **duplicates,
        "metrics": classification_metrics(scores, truth, labels),
        "suspects": find_suspects(probabilities, truth, answers),
        "warnings": _list_warnings(truth, answers, labels),
        "slices": worst_slices(wrong, sliced),
        "wrong": float(wrong.mean()),
    }


def _list_warnings(truth: np.ndarray, answers: np.ndarray, labels: Labels) -> list[str]:
    """Reasons not to trust the suspects. Takes classes (N,), or (N, C) of 0 and 1."""
    columns = np.arange(labels.size)
    truth_by_class, answers_by_class = (
        x if x.ndim == 2 else x[:, None] == columns for x in (truth, answers)
    )
    never_predicted = (truth_by_class.sum(axis=0) >= MIN_ROWS) & ~answers_by_class.any(axis=0)
    warnings = []
    if balanced_skill(truth, answers) < _WEAK:
        accuracy = (truth_by_class == answers_by_class).all(axis=1).mean()
        largest = np.unique(truth, axis=0, return_counts=True)[1].max() / len(truth)
        shares = f"{100 * accuracy:.1f} % of the rows, and the same answer for all would be for {100 * largest:.1f} %"
        warnings.append(
            f"do not rely on the list of wrong labels: the models are right for {shares}"
        )
    if never_predicted.any():
        names = listing(labels.names[c] for c in np.flatnonzero(never_predicted))
        warnings.append(
            f"the models never predict {names}: rows with these labels are suspected whatever the text"
        )
    if warnings:
        warnings[-1] += (
            "; train longer (--num_train_epochs, --learning_rate), or take a larger model"
        )
    return warnings


def _duplicates(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`groups` of near duplicates, those with different labels, of which one must be wrong, first; `leaks`: rows with a
    near duplicate in the training rows of their fold's model."""
    rows = [
        [lines[row] for row in group] for group in near_duplicates([line["text"] for line in lines])
    ]
    groups = [
        {"lines": group, "differ": any(line["label"] != group[0]["label"] for line in group)}
        for group in rows
    ]
    leaks = sum(
        any(other["fold"] != line["fold"] for other in group) for group in rows for line in group
    )
    return {"groups": sorted(groups, key=lambda group: not group["differ"]), "leaks": leaks}


def _label(classes: Sequence[int], labels: Labels) -> Any:
    names = [labels.names[c] for c in classes]
    return names if labels.problem_type == MULTI else names[0]


def _errors(
    lines: Sequence[dict[str, Any]], errors: Sequence[Suspect], labels: Labels
) -> list[dict[str, Any]]:
    return [
        {"id": line["id"], "text_digest": line["text_digest"], "label": _label(suspect.suggested, labels),
         "original_label": line["label"], "margin": round(suspect.margin, 6), "text": line["text"]}
        for suspect in errors for line in [lines[suspect.row]]
    ]  # fmt: skip


def _row(line: dict[str, Any], suspect: Suspect, labels: Labels) -> dict[str, Any]:
    """A row of the page, with the labels to choose from, the suggested one first."""
    each = dict(zip(labels.names, line["probabilities"], strict=True))
    suggested = _label(suspect.suggested, labels)
    if labels.problem_type == MULTI:
        names, choices = sorted({*line["label"], *suggested}), [suggested]
    else:
        names, likely = (
            [line["label"], suggested],
            sorted(each, key=lambda name: -each[name])[:_MAX_CHOICES],
        )
        choices = [suggested, *(name for name in likely if name not in names)]
    written = [(json.dumps(choice, ensure_ascii=False), choice) for choice in choices]
    return {
        **line,
        "suggested": suggested,
        "shown": [(name, each[name]) for name in names],
        "choices": written,
    }
