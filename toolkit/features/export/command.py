"""`toolkit export MODEL OUT --to openvino|onnx|server`: exports a classifier and compares its
predictions with torch."""

from __future__ import annotations

import math
import os
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np

from toolkit import launch
from toolkit.data.labels import MULTI, REGRESSION, Labels
from toolkit.data.token_files import load_split
from toolkit.data.tokens import LengthBuckets, Split
from toolkit.errors import UserError, printable
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.metrics import classification_metrics
from toolkit.evaluation.saved_model import SavedModel, training_run
from toolkit.evaluation.self_test import FILE, TOLERANCE, write_self_test
from toolkit.features.export.convert import convert
from toolkit.features.export.server import export_for_servers
from toolkit.pretrained import quiet_transformers
from toolkit.utils.cache import cache_folder
from toolkit.utils.extras import require_extra
from toolkit.utils.files import explain_write_errors, replace_folder

_PACKAGES = {"openvino": ["openvino"], "onnx": ["onnx", "onnxruntime"]}
_BATCH = (64, 16384)  # rows, tokens
_OWN = shutil.ignore_patterns("*.safetensors*", "*.bin*", FILE)
"""What OUT does not have, or has of its own."""


def export(options: Namespace) -> None:
    """Writes the folder `options.out` atomically.

    Raises UserError for a model that cannot be exported, and if too many of its answers differ.
    """
    out = Path(options.out)
    if os.path.lexists(out):
        raise UserError(f"{out} exists: name another folder, nothing is overwritten")
    if options.to == "server":
        if options.int8:
            raise UserError("--int8 is for --to openvino and onnx: leave it out")
        export_for_servers(*_open_model(options.model), out, options.self_test)
        return
    packages = list(_PACKAGES[options.to])
    if options.int8:
        packages.append("nncf")
    require_extra(options.to, options.to, *packages)
    saved, answers = _open_model(options.model)
    splits = _cached_splits(saved, options.model)
    validation = splits["validation"]
    calibration = splits["train"] if options.int8 else None
    accelerator, max_length = launch.make_accelerator("no"), saved.choose_max_length(None)
    saved.load(accelerator, max_length, *_BATCH, options.self_test)
    before = answers.adjust_logits(saved.compute_outputs(validation))
    with explain_write_errors(out), replace_folder(out) as draft, quiet_transformers():
        shutil.copytree(options.model, draft, ignore=_OWN, dirs_exist_ok=True)
        try:
            convert(saved.model.cpu(), saved.tokenizer, draft, options.to, calibration)
        except OSError:  # the disk's
            raise
        except Exception as error:
            name = type(saved.model).__name__
            why = printable(error, 200)
            fault = f"the converter to {options.to} cannot convert {name}: {why}"
            raise UserError(f"{fault}; toolkit predict computes it with torch") from error
        exported = SavedModel(str(draft))
        exported.load(accelerator, max_length, *_BATCH)
        after = answers.adjust_logits(exported.compute_outputs(validation))
        changed, result = compare(before, after, validation, answers.labels)
        if changed > options.max_changed:
            remedy = f"to accept this, pass --max_changed {math.ceil(changed)}"
            raise UserError(f"{out} was not written: {result}; {remedy}")
        write_self_test(draft, TOLERANCE["bf16" if options.int8 else "no"])
        precision = "int8" if options.int8 else "float32"
        with (draft / "README.md").open("a", encoding="utf-8") as card:
            card.write(
                f"\n## Exported\n\nThe model above in {precision} for {options.to}. "
            )
            card.write(f"Compared with torch: {result}.\n")
    print(f"{result}\nwrote {out}: toolkit predict {out} FILE")


def _open_model(name: str) -> tuple[SavedModel, ClassAnswers]:
    """Raises UserError for a model that cannot be exported."""
    saved = SavedModel(name)
    if not isinstance(saved.answers, ClassAnswers):
        raise UserError(
            f"{name} is no classifier or regression, which toolkit export takes: "
            "toolkit predict computes it with torch"
        )
    if LengthBuckets.of_model(saved.config):
        why = "which only torch has here: use toolkit predict"
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
    return {
        split: load_split(folder, split, saved.config) for split in ("train", "validation")
    }


def compare(
    before: np.ndarray, after: np.ndarray, split: Split, labels: Labels
) -> tuple[float, str]:
    """Compares (N, C) scores of torch and of the exported model, whose argmax or sign is the
    answer: how many of 100 answers differ (for regression how many percent of the variance of
    torch's numbers the others do not explain), and a sentence."""
    metric = "accuracy"
    same = "of the answers are the same"
    if labels.problem_type == REGRESSION:
        metric = "mse"
        same = "of the variance of its numbers is the same"
        spread = np.square(before - before.mean(axis=0)).sum(axis=0)
        error = np.square(after - before).sum(axis=0)
        changed = 100 * float((error / np.maximum(spread, 1e-12)).max())
    else:
        differs = before.argmax(axis=1) != after.argmax(axis=1)
        if labels.problem_type == MULTI:
            differs = ((before > 0) != (after > 0)).any(axis=1)
        changed = 100 * float(differs.mean())
    of_torch = classification_metrics(before, split.labels, labels)[metric]
    of_export = classification_metrics(after, split.labels, labels)[metric]
    result = (
        f"{metric} {of_export:.4f} (torch {of_torch:.4f}), {100 - changed:.2f} % {same}"
    )
    return changed, f"{result}, on {len(split)} rows of {split.name}"
