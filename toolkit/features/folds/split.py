"""`--folds`: which part of the training rows each model does not see, and which model is next."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pydantic

from toolkit.data.labels import MULTI, Labels
from toolkit.data.rows import Rows, Targets, data_seed, limit_rows
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.utils.cache import digest_of_text
from toolkit.utils.files import explain_write_errors, read_table, replace_file

if TYPE_CHECKING:
    from accelerate import Accelerator

FOLDS, PART = "folds.json", "out_of_fold.jsonl"
_COUNT = (lambda value: type(value) is int and 1 < value <= 100, "a number from 2 to 100")


def fold_folder(output_dir: str | Path, fold: int) -> Path:
    return Path(output_dir) / f"fold-{fold}"


def unfinished(output_dir: str | Path) -> list[int]:
    """Those whose part has no answers yet, from 1."""
    return [fold for fold in numbers(output_dir) if not (fold_folder(output_dir, fold) / PART).is_file()]


def numbers(output_dir: str | Path) -> range:
    """Of the folds in a folder, from 1."""
    return range(1, 1 + read_table(Path(output_dir) / FOLDS, {"folds": _COUNT})["folds"])


def data_facts(
    settings: Any, folds: int | None, corrections: str | None, facts: Mapping[str, Any], accelerator: Accelerator | None
) -> dict[str, Any]:
    """What `--folds` and `--label_corrections` add to what the data depend on, `fold`, the next to train, among it."""
    added: dict[str, Any] = {}
    if corrections:
        lines = [correction.model_dump() for _, correction in _corrections(Path(corrections)).values()]
        added["label_corrections"] = text_digest(json.dumps(lines))
    if folds:
        added |= {"folds": folds, "seed": data_seed(settings)}
        digest = digest_of_text(json.dumps({**facts, **added}, sort_keys=True))
        added["fold"] = next_fold(accelerator, str(settings.training.output_dir), folds, digest)
    return added


def select_rows(
    settings: Any, corrections: str | None, facts: Mapping[str, Any], rows: Rows, targets: Any
) -> tuple[dict[str, Rows], list[str]]:
    """The training rows with corrected labels; of a fold its training rows and the part that it is judged on."""
    notes: list[str] = []
    if corrections:
        rows, note = corrected(rows, targets, corrections)
        notes.append(note)
    if "fold" not in facts:
        return {"train": rows}, notes
    seed = data_seed(settings)
    rows, more = limit_rows(rows, "train", settings.data.max_train_samples, seed)
    parts, note = without_part(rows, targets, facts["folds"], facts["fold"], seed)
    return parts, [*notes, *more, note]


def next_fold(accelerator: Accelerator | None, output_dir: str, folds: int, digest: str) -> int:
    """The fold to train now, from 1; all processes call this. `digest`: of the rows and how they are read, which the
    folds in one folder have in common.

    Raises UserError where the folder is of other data or another number, and where all folds are done.
    """
    fold, fault = 1, ""
    if accelerator is None or accelerator.is_main_process:
        try:
            fold = _next(Path(output_dir), folds, digest)
        except UserError as error:
            fault = str(error)
    if accelerator is not None:
        from accelerate.utils import broadcast_object_list

        fold, fault = broadcast_object_list([fold, fault])
    if fault:
        raise UserError(fault)
    return fold


def settings_of(accelerator: Accelerator, settings: Any, fold: int) -> Any:
    """The settings of one fold's run, in a folder of its own; one without a checkpoint to resume from is moved
    aside."""
    folder = fold_folder(settings.training.output_dir, fold)
    stale = accelerator.is_main_process and folder.exists() and not any(folder.glob("checkpoints/step-*/manifest.json"))
    training = replace(settings.training, output_dir=str(folder), overwrite_output_dir=stale)
    return replace(settings, training=training)


def _next(folder: Path, folds: int, digest: str) -> int:
    if (folder / "metrics.jsonl").exists():
        raise UserError(f"--output_dir {folder} holds a run without --folds: name another folder")
    if (folder / FOLDS).is_file():
        known = read_table(folder / FOLDS, {"folds": _COUNT})
        if known != {"folds": folds, "digest": digest}:
            raise UserError(
                f"--output_dir {folder} holds {known.get('folds')} folds of these or other rows, and not the {folds} "
                "of this command (--folds, the data, --data_seed and how texts are read must be the same): name "
                "another folder"
            )
    else:
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with replace_file(folder / FOLDS) as draft:
                draft.write_text(json.dumps({"folds": folds, "digest": digest}), encoding="utf-8")
    if not (remaining := unfinished(folder)):
        raise UserError(
            f"--output_dir {folder}: all {folds} folds are done; `toolkit report {folder}` writes their page"
        )
    return remaining[0]


def without_part(rows: Rows, targets: Targets, folds: int, fold: int, seed: int) -> tuple[dict[str, Rows], str]:
    """({"train": the rows without part `fold` of `folds`, "validation": that part}, a note); by class where there are
    classes. Raises UserError for fewer rows than folds."""
    from sklearn.model_selection import KFold, StratifiedKFold

    count = len(rows)
    if count < folds:
        raise UserError(f"{rows.table.name}: {count} rows are too few for --folds {folds}")
    classes = targets.strata(rows.targets)
    stratified = classes is not None and int(np.bincount(classes).max()) >= folds
    kind: Any = StratifiedKFold if stratified else KFold
    with warnings.catch_warnings():  # a class with fewer rows than folds is not in each of them
        warnings.simplefilter("ignore", UserWarning)
        parts = list(kind(folds, shuffle=True, random_state=seed).split(np.zeros(count), classes))
    train, part = parts[fold - 1]
    note = f"fold {fold} of {folds}: {len(part)} of {count} rows are held back (seed {seed})"
    return {"train": rows.take(np.sort(train)), "validation": rows.take(np.sort(part))}, note


def text_digest(text: str) -> str:
    """What tells a file of corrections whether a row still holds the text that was looked at."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def corrected(rows: Rows, targets: Labels, file: str) -> tuple[Rows, str]:
    """(the training rows with the labels of `--label_corrections` and without those it leaves out, a note).

    Raises UserError naming the line and the row where the file does not fit.
    """
    places = {int(row): place for place, row in enumerate(rows.numbers)}
    corrections = _corrections(Path(file))
    texts = _texts_at(sorted(places[row] for row in corrections if row in places), rows)
    encoded, stays, counts = rows.targets.copy(), np.ones(len(places), bool), {"changed": 0, "same": 0, "out": 0}
    for row, (line, correction) in corrections.items():
        where = f"--label_corrections {file}, line {line}: row {row + 1} of {rows.table.name}"
        if row not in places:
            raise UserError(f"{where} is not among the training rows")
        place = places[row]
        if text_digest(texts[place]) != correction.text_digest:
            raise UserError(f"{where} holds another text than the one whose label was looked at: it is of other data")
        if correction.label is None:
            stays[place] = False
            counts["out"] += 1
            continue
        value = _encoded(correction.label, targets, where)
        counts["same" if np.array_equal(value, encoded[place]) else "changed"] += 1
        encoded[place] = value
    summary = (
        f"{counts['changed']} labels are changed, {counts['same']} are as they were, {counts['out']} rows left out"
    )
    changed, note = replace(rows, targets=encoded), f"{rows.table.name}: {summary} (--label_corrections {file})"
    return changed if stays.all() else changed.take(np.flatnonzero(stays)), note


def _encoded(label: Any, labels: Labels, where: str) -> Any:
    """A class's name, or a list of them (multi-label), as `Labels.encode` has it. Raises UserError for another."""
    known = {name: place for place, name in enumerate(labels.names)}
    names, multi = label if isinstance(label, list) else [label], labels.problem_type == MULTI
    strange = [name for name in names if name not in known]
    if strange or labels.problem_type == "regression" or isinstance(label, list) != multi:
        near = did_you_mean(str(strange[0]), known) if strange else ""
        raise UserError(f"{where}: {label!r} is no label{near}: the classes are {listing(known)}")
    return (
        np.isin(np.arange(labels.size), [known[name] for name in names]).astype(np.float32) if multi else known[label]
    )


def _texts_at(places: list[int], rows: Rows) -> dict[int, str]:
    """The texts of some samples, second ones below the first, as reports show them."""
    blocks = rows.take(np.array(places, np.int64)).texts()
    texts = (
        f"{text}\n{pairs[index]}" if pairs else text for texts, pairs in blocks for index, text in enumerate(texts)
    )
    return dict(zip(places, texts, strict=True))


class _Correction(pydantic.BaseModel, strict=True):
    """A line of `--label_corrections`."""

    id: pydantic.NonNegativeInt
    """The row, from 0."""
    text_digest: str
    label: str | list[str] | None
    """None leaves the row out."""


def _corrections(path: Path) -> dict[int, tuple[int, _Correction]]:
    """Row -> (line, correction). Raises UserError naming the line that is none, or a row's second one."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold other ends of lines
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
                f'--label_corrections {path}, line {number}: it must be {{"id": row from 0, "text_digest": "...", '
                '"label": the right one, or null to leave the row out}, as report.html and label_errors.jsonl have them'
            ) from None
        if corrections.setdefault(correction.id, (number, correction))[0] != number:
            raise UserError(f"--label_corrections {path}, line {number}: row {correction.id + 1} is there twice")
    return corrections
