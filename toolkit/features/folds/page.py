"""The page of `--folds`: what models say of rows that they were not trained on, and which labels are probably wrong."""

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
from toolkit.data.tokens import Split, length_bins
from toolkit.errors import UserError, listing
from toolkit.evaluation import Evaluation, classification_metrics
from toolkit.evaluation.outputs import ids_fault
from toolkit.features.folds.duplicates import SIMILAR, near_duplicates
from toolkit.features.folds.label_errors import Suspect, skill, suspects
from toolkit.features.folds.split import PART, fold_folder, numbers, text_digest, unfinished
from toolkit.report.files import dumps, read_lines, write_atomically
from toolkit.report.record import Record, render
from toolkit.report.slices import MIN_ROWS, worst_slices

ERRORS = "label_errors.jsonl"
_WEAK = 0.25
"""Below this skill more of the list is the models' ignorance than wrong labels. It has no unit: see `skill`."""
_MOST_SUSPECTS, _MOST_GROUPS, _MOST_OF_GROUP, _MOST_CHARACTERS, _MOST_CHOICES = 500, 50, 6, 600, 12


def write_part(folder: Path, fold: int, split: Split, lines: Sequence[dict[str, Any]]) -> None:
    """A fold's model's answers for its part: a line per row, which makes the fold complete."""
    rows = zip(lines, split.texts(), split.lengths.tolist(), split.group_cells() or [{}] * len(split), strict=True)
    write_atomically(
        folder / PART,
        (
            dumps({**line, "fold": fold, "tokens": tokens, "sources": sources, "text_digest": text_digest(text),
                   "text": text}) + "\n"
            for line, text, tokens, sources in rows
        ),
    )  # fmt: skip


def finish_fold(folder: Path, data: Prepared, evaluation: Evaluation) -> list[str]:
    """Writes what a fold's model answers for its part; after the last one all parts together. All processes call it,
    and train the next fold where there is one."""
    remaining, lines = 0, []
    if evaluation.predictions:  # on the main process
        write_part(folder, data.feature_facts["fold"], data.validation, list(evaluation.predictions()))
        remaining = len(unfinished(folder.parent))
        lines = [f"{remaining} folds remain"] if remaining else write_folds(folder.parent)
    if broadcast_object_list([remaining])[0]:
        launch.request_rerun()
    return lines


def write_folds(folder: Path) -> list[str]:
    """Joins the parts: out_of_fold.jsonl, label_errors.jsonl and report.html. Returns lines for the screen.

    Raises UserError where a fold is missing, or a row is not there exactly once.
    """
    if remaining := unfinished(folder):
        raise UserError(f"{folder}: fold {listing(remaining)} is not done: start the same command again")
    runs = [fold_folder(folder, fold) for fold in numbers(folder)]
    records = [Record.load(run) for run in runs]
    lines = sorted((line for run in runs for line in read_lines(run / PART)), key=lambda line: line["id"])
    expected = sum(record.data["samples"]["validation"] for record in records)
    fault = ids_fault(np.array([line["id"] for line in lines]), np.unique([line["id"] for line in lines]))
    if fault or expected != len(lines):
        raise UserError(
            f"{folder}: its folds do not answer for each row once ({fault or f'{len(lines)} of {expected}'})"
        )
    write_atomically(folder / "out_of_fold.jsonl", (dumps(line) + "\n" for line in lines))
    labels = Labels(cast(ProblemType, records[0].problem_type), tuple(records[0].data["labels"]), ())
    analysis = _analysis(lines, labels)
    write_atomically(folder / ERRORS, (dumps(line) + "\n" for line in _errors(lines, analysis["suspects"], labels)))
    shown = [_row(lines[suspect.place], suspect, labels) for suspect in analysis["suspects"][:_MOST_SUSPECTS]]
    numbers_of = [record.last.single_numbers for record in records]  # a recipe's metrics may have other names
    names = [
        name
        for name, value in analysis["metrics"].items()
        if isinstance(value, float) and all(name in o for o in numbers_of)
    ]
    spread = {name: statistics.stdev([numbers[name] for numbers in numbers_of]) for name in names}
    context = {**analysis, "record": records[0], "records": records, "folder": folder.resolve().name, "shown": shown,
               "names": names, "spread": spread, "count": len(lines), "similar": SIMILAR,
               "shortened": lambda text: text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…",
               "most_groups": _MOST_GROUPS, "most_of_group": _MOST_OF_GROUP}  # fmt: skip
    write_atomically(folder / "report.html", [render(Path(__file__).with_name("folds.html"), context)])
    metrics = "  ".join(f"{name} {analysis['metrics'][name]:.4f}" for name in names)
    return [
        *analysis["doubts"],
        f"all {len(runs)} folds are done; out of fold, {len(lines)} rows: {metrics}",
        f"{len(analysis['suspects'])} labels are suspected to be wrong, "
        f"{len(analysis['groups'])} groups of near duplicates",
        f"  {folder}/report.html         look at them, and save the corrections: --label_corrections FILE",
        f"  {folder}/{ERRORS}   the same labels, as corrections that are all accepted",
        f"  {folder}/out_of_fold.jsonl   every row with probabilities of a model that was not trained on it",
    ]


def _analysis(lines: Sequence[dict[str, Any]], labels: Labels) -> dict[str, Any]:
    """Metrics, suspects, groups of near duplicates and slices of all rows."""
    groups = _groups(near_duplicates([line["text"] for line in lines]), lines)
    duplicates = {"groups": groups, "leaks": _leaks(groups, lines)}
    if labels.problem_type == "regression":
        guess, truth = (np.array([line[name] for line in lines]) for name in ("prediction", "label"))
        metrics = classification_metrics(guess.reshape(len(lines), -1), truth, labels)
        return {**duplicates, "metrics": metrics, "suspects": [], "slices": [], "doubts": []}
    chances = np.array([line["probabilities"] for line in lines])
    places = {name: place for place, name in enumerate(labels.names)}
    if labels.problem_type == MULTI:
        truth, answers = (
            np.array([[name in line[key] for name in labels.names] for line in lines]).astype(float)
            for key in ("label", "prediction")
        )
        scores = chances - 0.5
    else:
        truth, scores = np.array([places[line["label"]] for line in lines]), chances
        likeliest = chances.argmax(axis=1)  # where no answer was given
        answers = np.array([places.get(line["prediction"], p) for line, p in zip(lines, likeliest, strict=True)])
    wrong = np.array([line["prediction"] != line["label"] for line in lines])
    sliced = {"length": length_bins(np.array([line["tokens"] for line in lines]))}
    sliced |= {name: [line["sources"].get(name, "") for line in lines] for name in lines[0]["sources"]}
    sliced["label"] = [", ".join(line["label"]) if labels.problem_type == MULTI else line["label"] for line in lines]
    return {
        **duplicates,
        "metrics": classification_metrics(scores, truth, labels),
        "suspects": suspects(chances, truth, answers),
        "doubts": _doubts(truth, answers, labels),
        "slices": worst_slices(wrong, sliced),
        "wrong": float(wrong.mean()),
    }


def _doubts(truth: np.ndarray, answers: np.ndarray, labels: Labels) -> list[str]:
    """What keeps a list that these answers have made from being of use. (N,) classes, or (N, C) 0 and 1."""
    truth_by_class, answers_by_class = (
        each if each.ndim == 2 else each[:, None] == np.arange(labels.size) for each in (truth, answers)
    )
    unknown = (truth_by_class.sum(axis=0) >= MIN_ROWS) & ~answers_by_class.any(axis=0)
    doubts = []
    if skill(truth, answers) < _WEAK:
        right = (truth_by_class == answers_by_class).all(axis=1).mean()
        largest = np.unique(truth, axis=0, return_counts=True)[1].max() / len(truth)
        doubts.append(
            f"do not rely on the list of wrong labels: the models are right about {100 * right:.1f} % of the rows, and "
            f"one answer for all would be about {100 * largest:.1f} %"
        )
    if unknown.any():
        names = listing(labels.names[place] for place in np.flatnonzero(unknown))
        doubts.append(f"the models never answer {names}: they suspect rows with these labels whatever the texts are")
    mends = "train longer (--num_train_epochs, --learning_rate), or take a larger model"
    return [*doubts[:-1], *(f"{doubt}; {mends}" for doubt in doubts[-1:])]


def _groups(groups: Sequence[Sequence[int]], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of places -> their lines; those whose labels differ first, since one of them must be wrong."""
    rows = [[lines[place] for place in group] for group in groups]
    marked = [{"lines": some, "differ": any(line["label"] != some[0]["label"] for line in some)} for some in rows]
    return sorted(marked, key=lambda group: not group["differ"])


def _leaks(groups: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> int:
    """Rows with a near duplicate among what their fold's model was trained on."""
    return sum(any(o["fold"] != line["fold"] for o in group["lines"]) for group in groups for line in group["lines"])


def _label(places: Sequence[int], labels: Labels) -> Any:
    names = [labels.names[place] for place in places]
    return names if labels.problem_type == MULTI else names[0]


def _errors(lines: Sequence[dict[str, Any]], errors: Sequence[Suspect], labels: Labels) -> list[dict[str, Any]]:
    return [
        {"id": line["id"], "text_digest": line["text_digest"], "label": _label(suspect.suggested, labels),
         "given": line["label"], "margin": round(suspect.margin, 6), "text": line["text"]}
        for suspect in errors for line in [lines[suspect.place]]
    ]  # fmt: skip


def _row(line: dict[str, Any], suspect: Suspect, labels: Labels) -> dict[str, Any]:
    """A row of the page, with what its label may be changed to: the suggestion first."""
    chances = dict(zip(labels.names, line["probabilities"], strict=True))
    suggested = _label(suspect.suggested, labels)
    choices = [suggested]
    if labels.problem_type != MULTI:
        likely = sorted(chances, key=lambda name: -chances[name])[:_MOST_CHOICES]
        choices += [name for name in likely if name not in (suggested, line["label"])]
    names = [line["label"], suggested] if labels.problem_type != MULTI else sorted({*line["label"], *suggested})
    return {
        **line,
        "suggested": suggested,
        "chances": [(name, chances[name]) for name in names],
        "choices": [(json.dumps(choice, ensure_ascii=False), choice) for choice in choices],
    }
