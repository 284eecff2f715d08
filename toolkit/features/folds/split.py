"""`--folds` and `--label_corrections`: the next fold, its rows, and corrected labels."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit import launch
from toolkit.config import flat
from toolkit.data.labels import MULTI, Labels
from toolkit.data.prepare import data_seed, limit_rows
from toolkit.data.table import Rows
from toolkit.data.targets import Targets
from toolkit.data.tokens import join_pair
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.evaluation.saved_model import training_run
from toolkit.utils.cache import digest_of_text
from toolkit.utils.files import explain_write_errors, read_table, replace_file

FOLDS, PART = "folds.json", "out_of_fold.jsonl"
_COUNT = (lambda value: type(value) is int and 1 < value <= 100, "a number from 2 to 100")


def fold_folder(output_dir: str | Path, fold: int) -> Path:
    return Path(output_dir) / f"fold-{fold}"


def unfinished(output_dir: str | Path) -> list[int]:
    """Folds without predictions, from 1."""
    return [
        fold
        for fold in fold_numbers(output_dir)
        if not (fold_folder(output_dir, fold) / PART).is_file()
    ]


def fold_numbers(output_dir: str | Path) -> range:
    """All folds of a folder, from 1."""
    return range(1, 1 + read_table(Path(output_dir) / FOLDS, {"folds": _COUNT})["folds"])


def data_facts(
    settings: Any,
    folds: int | None,
    corrections: str | None,
    facts: Mapping[str, Any],
    accelerator: Accelerator | None,
) -> dict[str, Any]:
    """The facts of `--folds` and `--label_corrections`, such as `fold`, the fold to train now."""
    added: dict[str, Any] = {}
    if corrections:
        lines = [
            correction.model_dump()
            for _, correction in _read_corrections(Path(corrections)).values()
        ]
        added["label_corrections"] = text_digest(json.dumps(lines))
    if folds:
        refuse_leaks(settings, accelerator)
        added |= {"folds": folds, "duplicates": "in one fold", "seed": data_seed(settings)}
        digest = digest_of_text(json.dumps({**facts, **added}, sort_keys=True))
        added["fold"] = next_fold(accelerator, str(settings.training.output_dir), folds, digest)
    return added


def select_rows(
    settings: Any, corrections: str | None, facts: Mapping[str, Any], rows: Rows, targets: Any
) -> tuple[dict[str, Rows], list[str]]:
    """({split: rows}, notes): the training rows with corrected labels, split if there are folds."""
    notes: list[str] = []
    if corrections:
        rows, note = correct_labels(rows, targets, corrections)
        notes.append(note)
    if "fold" not in facts:
        return {"train": rows}, notes
    rows, limit_notes = limit_rows(rows, "train", settings)
    parts, note = split_fold(rows, targets, facts["folds"], facts["fold"], data_seed(settings))
    return parts, [*notes, *limit_notes, note]


def refuse_leaks(settings: Any, accelerator: Accelerator | None) -> None:
    """Raises UserError if `--model_name_or_path` or `--teacher` was trained on the labels of these rows, which
    out-of-fold predictions would repeat. Warns of other teachers: what they were trained on is unknown."""
    values = flat(settings)
    for setting in ("model_name_or_path", "teacher"):
        name = str(values.get(setting) or "")
        run = training_run(name) if name else {"data": {}}
        if run["data"].get("labels") and _source(
            run["settings"], run["launch"].get("folder")
        ) == _source(values):
            other = (
                "leave --teacher out"
                if setting == "teacher"
                else "name the model that it was fine-tuned from"
            )
            why = "was trained on these rows' labels (its run's config.json), and --folds would predict them again"
            raise UserError(f"--{setting} {name} {why}: {other}")
    if values.get("teacher") and accelerator is not None:
        why = (
            "the folds repeat them: the out-of-fold predictions are too good, and hide wrong labels"
        )
        line = f"--teacher {values['teacher']}: if it was trained on these rows' labels, {why}"
        launch.log_on_main(accelerator, line)


def _source(values: Mapping[str, Any], folder: str | None = None) -> list[Any]:
    """The data that settings name in this working directory, or in another."""
    file = values.get("train_file")
    names = ("dataset_name", "dataset_config_name", "label_column")
    return [file and Path(folder or "", file).resolve(), *map(values.get, names)]


def next_fold(accelerator: Accelerator | None, output_dir: str, folds: int, digest: str) -> int:
    """The fold to train now, from 1. A collective. `digest`: of the rows and how they are read.

    Raises UserError if the folder has folds of other data or another number of folds, or all are done.
    """
    result: list[Any] = [1, ""]
    if accelerator is None or accelerator.is_main_process:
        try:
            result[0] = _next(Path(output_dir), folds, digest)
        except UserError as error:
            result[1] = str(error)
    fold, fault = result if accelerator is None else broadcast_object_list(result)
    if fault:
        raise UserError(fault)
    return int(fold)


def settings_of_fold(accelerator: Accelerator, settings: Any, fold: int) -> Any:
    """The settings of one fold's run, in its own folder; a folder without a checkpoint to resume from is moved away."""
    folder = fold_folder(settings.training.output_dir, fold)
    stale = (
        accelerator.is_main_process
        and folder.exists()
        and not any(folder.glob("checkpoints/step-*/state.json"))
    )
    training = replace(settings.training, output_dir=str(folder), overwrite_output_dir=stale)
    return replace(settings, training=training)


def _next(folder: Path, folds: int, digest: str) -> int:
    if (folder / "metrics.jsonl").exists():
        raise UserError(f"--output_dir {folder} has a run without --folds: name another folder")
    if (folder / FOLDS).is_file():
        known = read_table(folder / FOLDS, {"folds": _COUNT})
        if known != {"folds": folds, "digest": digest}:
            hint = f"give the same --folds (here {folds}), data, --data_seed and text settings, or name another folder"
            raise UserError(
                f"--output_dir {folder} has {known.get('folds')} folds of another command: {hint}"
            )
    else:
        with explain_write_errors(folder), replace_file(folder / FOLDS) as draft:
            draft.write_text(json.dumps({"folds": folds, "digest": digest}), encoding="utf-8")
    if not (remaining := unfinished(folder)):
        raise UserError(
            f"{folder}: all {folds} folds are done; `toolkit report {folder}` writes their page"
        )
    return remaining[0]


def split_fold(
    rows: Rows, targets: Targets, folds: int, fold: int, seed: int
) -> tuple[dict[str, Rows], str]:
    """({"train": rows, "validation": rows}, note) of one of `folds` folds, stratified by class if there are classes.
    All rows of a text are in one fold. Raises UserError for fewer texts than folds."""
    import pandas as pd
    from sklearn.model_selection import KFold, StratifiedKFold

    first = pd.factorize(rows.hashes)[
        0
    ]  # (rows,) the place of a row's text among the different texts
    different = rows.take(np.unique(first, return_index=True)[1])  # the first row of each text
    count = len(different)
    if count < folds:
        raise UserError(
            f"{rows.table.name}: {count} different texts are too few for --folds {folds}"
        )
    classes = targets.strata(different.targets)
    stratified = classes is not None and int(np.bincount(classes).max()) >= folds
    kind: Any = StratifiedKFold if stratified else KFold
    with warnings.catch_warnings():  # of a class with fewer rows than folds
        warnings.simplefilter("ignore", UserWarning)
        parts = list(kind(folds, shuffle=True, random_state=seed).split(np.zeros(count), classes))
    held_out = np.isin(first, parts[fold - 1][1])
    note = (
        f"fold {fold} of {folds}: {held_out.sum()} of {len(rows)} rows for validation (seed {seed})"
    )
    return {
        "train": rows.take(np.flatnonzero(~held_out)),
        "validation": rows.take(np.flatnonzero(held_out)),
    }, note


def text_digest(text: str) -> str:
    """Detects corrections of another text than the row has."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def correct_labels(rows: Rows, targets: Labels, file: str) -> tuple[Rows, str]:
    """(the training rows with the labels of `--label_corrections`, without the rows it leaves out, a note).

    Raises UserError naming the line and the row if the file does not fit.
    """
    index_of = {int(row): index for index, row in enumerate(rows.numbers)}
    corrections = _read_corrections(Path(file))
    texts = _texts_of(sorted(index_of[row] for row in corrections if row in index_of), rows)
    encoded, is_kept, counts = (
        rows.targets.copy(),
        np.ones(len(index_of), bool),
        {"changed": 0, "same": 0, "out": 0},
    )
    for row, (line, correction) in corrections.items():
        where = f"--label_corrections {file}, line {line}: id {row} (row {row + 1} of {rows.table.name})"
        if row not in index_of:
            raise UserError(f"{where} is not among the training rows")
        index = index_of[row]
        if text_digest(texts[index]) != correction.text_digest:
            raise UserError(f"{where} has another text: the corrections belong to other data")
        if correction.label is None:
            is_kept[index] = False
            counts["out"] += 1
            continue
        value = _encode(correction.label, targets, where)
        counts["same" if np.array_equal(value, encoded[index]) else "changed"] += 1
        encoded[index] = value
    summary = f"{counts['changed']} labels changed, {counts['same']} unchanged, {counts['out']} rows left out"
    changed, note = (
        replace(rows, targets=encoded),
        f"{rows.table.name}: {summary} (--label_corrections {file})",
    )
    return changed if is_kept.all() else changed.take(np.flatnonzero(is_kept)), note


def _encode(label: Any, labels: Labels, where: str) -> Any:
    """Encodes a class's name, or a list of them (multi-label), like `Labels.encode`. Raises UserError for others."""
    names, multi = label if isinstance(label, list) else [label], labels.problem_type == MULTI
    unknown = [name for name in names if name not in labels.names]
    if unknown or labels.problem_type == "regression" or isinstance(label, list) != multi:
        near = did_you_mean(str(unknown[0]), labels.names) if unknown else ""
        raise UserError(
            f"{where}: {label!r} is no label{near}: the classes are {listing(labels.names)}"
        )
    return (
        np.array([name in names for name in labels.names], np.float32)
        if multi
        else labels.names.index(label)
    )


def _texts_of(indices: list[int], rows: Rows) -> dict[int, str]:
    """Index -> text; pairs are joined as in reports."""
    blocks = rows.take(np.array(indices, np.int64)).texts()
    texts = (
        join_pair(text, pairs[i]) if pairs else text
        for texts, pairs in blocks
        for i, text in enumerate(texts)
    )
    return dict(zip(indices, texts, strict=True))


class _Correction(pydantic.BaseModel, strict=True):
    """A line of `--label_corrections`."""

    id: pydantic.NonNegativeInt
    """The row, from 0."""
    text_digest: str
    label: str | list[str] | None
    """None leaves the row out."""


def _read_corrections(path: Path) -> dict[int, tuple[int, _Correction]]:
    """Row -> (line, correction). Raises UserError naming an invalid line, or the second one of a row."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split(
            "\n"
        )  # not splitlines(): texts may contain U+0085
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--label_corrections {path} cannot be read: {error}") from None
    corrections: dict[int, tuple[int, _Correction]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            correction = _Correction.model_validate_json(line)
        except pydantic.ValidationError:
            raise UserError(
                f'--label_corrections {path}, line {number}: write {{"id": row from 0, "text_digest": "...", "label": '
                "label, or null to leave the row out}, as in label_errors.jsonl or the file saved by report.html"
            ) from None
        if corrections.setdefault(correction.id, (number, correction))[0] != number:
            raise UserError(
                f"--label_corrections {path}, line {number}: id {correction.id} has two lines"
            )
    return corrections
