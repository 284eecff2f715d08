"""`toolkit export MODEL OUT --to openvino|onnx`: exports a classifier and compares its predictions
with torch."""

from __future__ import annotations

import math
import os
import shutil
from argparse import Namespace
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np

from toolkit import launch
from toolkit.data.labels import Labels
from toolkit.data.tokens import LengthBuckets, Split, load_split
from toolkit.errors import UserError, first_line
from toolkit.evaluation.answers import DECISIONS, ClassAnswers
from toolkit.evaluation.saved_model import SavedModel, training_run
from toolkit.features.export.runtimes import FILES, export_format
from toolkit.pretrained import quiet_transformers
from toolkit.utils.cache import cache_folder
from toolkit.utils.extras import require_extra
from toolkit.utils.files import explain_write_errors, replace_folder

_PACKAGES = {"openvino": ["openvino"], "onnx": ["onnx", "onnxruntime"]}
_BATCH = (64, 16384)  # rows, tokens


def export(options: Namespace) -> None:
    """Writes the folder `options.out` atomically.

    Raises UserError for a model that cannot be exported, and if too many of its answers differ.
    """
    out = Path(options.out)
    if os.path.lexists(out):
        raise UserError(f"{out} exists: name another folder, nothing is overwritten")
    packages = list(_PACKAGES[options.to])
    if options.int8:
        packages.append("nncf")
    require_extra(options.to, options.to, *packages)
    saved, answers = _open_model(options.model)
    splits = _cached_splits(saved, options.model)
    validation = splits["validation"]
    saved.load(launch.make_accelerator("no"), saved.choose_max_length(None), *_BATCH)
    before = answers.adjust_logits(saved.compute_outputs(validation))
    with explain_write_errors(out), replace_folder(out) as draft, quiet_transformers():
        _convert(saved, draft, options.to, splits["train"] if options.int8 else None)
        decisions = Path(options.model, DECISIONS)
        if decisions.is_file():
            shutil.copyfile(decisions, draft / DECISIONS)
        exported = SavedModel(str(draft))
        exported.load(saved.accelerator, saved.max_length, *_BATCH)
        after = answers.adjust_logits(exported.compute_outputs(validation))
        result, losses = compare(before, after, validation.labels, answers.labels)
        result += f", on {len(validation)} rows of {validation.name}"
        _refuse_losses(losses, options, result)
        kind = f"{'int8' if options.int8 else 'float32'}, in {FILES[options.to]}"
        made_with = " and ".join(f"{name} {version(name)}" for name in packages)
        section = f"The model above for {options.to} ({kind}), made with {made_with}."
        _add_to_card(draft, Path(options.model), f"{section} Compared with torch: {result}.")
    print(f"{result}\nwrote {out}: toolkit predict {out} FILE")


def _open_model(name: str) -> tuple[SavedModel, ClassAnswers]:
    """Raises UserError for a model that cannot be exported."""
    kind = export_format(Path(name))
    if kind:
        raise UserError(f"{name} is already exported to {kind}: name the original model")
    saved = SavedModel(name)
    if not isinstance(saved.answers, ClassAnswers):
        raise UserError(f"{name} writes titles: toolkit export takes classifiers and regressions")
    if LengthBuckets.of_model(saved.config):
        why = "which neither OpenVINO nor ONNX Runtime has: toolkit predict computes it with torch"
        raise UserError(f"{name} is a BigBird with block-sparse attention, {why}")
    return saved, saved.answers


def _cached_splits(saved: SavedModel, name: str) -> dict[str, Split]:
    """The training and the validation rows of the model's run, from this machine's cache."""
    digest = training_run(name)["data"].get("digest")
    if digest is None:
        why = "it is checked on the rows of its run: name the model/ of a run's folder"
        raise UserError(f"{name} is in no run's folder, and {why}")
    folder = cache_folder() / "tokens" / str(digest)
    if not folder.is_dir():
        remedy = "`toolkit prepare` with the run's settings makes them again"
        raise UserError(f"this machine's cache has no tokens of {name}'s run: {remedy}")
    return {split: load_split(folder, split, saved.config) for split in ("train", "validation")}


def _convert(saved: SavedModel, folder: Path, kind: str, calibration: Split | None) -> None:
    """Writes the graph, the config and the tokenizer."""
    from toolkit.features.export.convert import convert

    model = saved.model.cpu()
    try:
        convert(model, folder, kind, calibration)
    except Exception as error:  # each converter raises its own
        reason = f"{type(error).__name__}: {first_line(error)[:300]}"
        why = f"cannot take this {type(model).__name__} [{reason}]"
        raise UserError(f"--to {kind} {why}") from error
    model.config.save_pretrained(folder)  # with the label names
    saved.tokenizer.save_pretrained(folder)


def compare(
    before: np.ndarray, after: np.ndarray, truth: np.ndarray, labels: Labels
) -> tuple[str, dict[str, float]]:
    """Compares (N, C) scores of torch and of the exported model, whose argmax or sign is the answer
    -> a sentence, and the losses in percentage points by the option that limits them: of accuracy
    (`max_drop`; for regression of the explained variance of torch's numbers) and changed answers
    (`max_changed`)."""
    if labels.problem_type == "regression":
        spread = np.square(before - before.mean(axis=0)).sum(axis=0)
        error = np.square(after - before).sum(axis=0)
        same = 100 * float((1 - error / np.maximum(spread, 1e-12)).min())
        return f"{same:.2f} % of the variance of its numbers is the same", {"max_drop": 100 - same}
    torchs, exported = _answers(before, labels), _answers(after, labels)
    truth = truth.reshape(len(truth), -1)
    same = 100 * float((torchs == exported).all(axis=1).mean())
    accuracy = 100 * float((exported == truth).all(axis=1).mean())
    of_torch = 100 * float((torchs == truth).all(axis=1).mean())
    result = f"accuracy {accuracy:.2f} % (torch {of_torch:.2f} %)"
    losses = {"max_drop": of_torch - accuracy, "max_changed": 100 - same}
    return f"{result}, {same:.2f} % of the answers are the same", losses


def _answers(scores: np.ndarray, labels: Labels) -> np.ndarray:
    """(N, C) scores -> (N, 1) classes, or (N, C) bool."""
    if labels.problem_type == "single_label_classification":
        return scores.argmax(axis=1)[:, None]
    return scores > 0


def _refuse_losses(losses: Mapping[str, float], options: Namespace, result: str) -> None:
    limits = {name: getattr(options, name) for name in losses}
    exceeded = [name for name in losses if losses[name] > limits[name]]
    if exceeded:
        allowed = " and ".join(f"--{name} {limits[name]:g}" for name in exceeded)
        needed = {name: math.ceil(100 * losses[name] - 1e-6) / 100 for name in exceeded}
        passes = " ".join(f"--{name} {points:g}" for name, points in needed.items())
        why = f"{result}, which exceeds {allowed}; to accept this, pass {passes}"
        raise UserError(f"{options.out} was not written: {why}")


def _add_to_card(folder: Path, source: Path, section: str) -> None:
    """The model's card, with a section about the export."""
    card = source / "README.md"
    text = f"# {source.name}\n"
    if card.is_file():
        text = card.read_text(encoding="utf-8")
    how = "`toolkit predict` takes this folder."
    text += f"\n## Exported\n\n{section} {how}\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
