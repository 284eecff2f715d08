"""What a script or a notebook does without a recipe: settings, predictions, an evaluation, a conversion.

`import toolkit` offers these, beside the building blocks of a recipe: docs/api.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from toolkit import launch
from toolkit.checkpoint.convert.conversion import ConvertSettings
from toolkit.checkpoint.convert.conversion import convert as convert_checkpoint
from toolkit.config import TASKS, build
from toolkit.data.read import Table
from toolkit.errors import UserError, did_you_mean
from toolkit.evaluation import classification_metrics
from toolkit.evaluation.decisions import Decisions
from toolkit.evaluation.saved_model import SavedModel
from toolkit.evaluation.titles import title_metrics
from toolkit.launch import failure_detector


def settings(task: str = "cls", **given: Any) -> Any:
    """The settings of a recipe (cls, bigbird or title) by their names. Raises UserError with every fault."""
    if task not in TASKS:
        raise UserError(f"settings({task!r}){did_you_mean(task, TASKS)}: there are {', '.join(TASKS)}")
    return build(TASKS[task], given)


def predict(model: str | Path, texts: Sequence[str], **sizes: int) -> list[dict[str, Any]]:
    """What a saved model says of each text, in their order: `prediction`, and `probabilities` in the order of its
    classes; a title model's `prediction` is a title. Thresholds, a temperature and where it gives no answer (None) are
    those of the model's decisions.json, where it has one.

    `sizes`: `per_device_batch_size`, `max_tokens`, as for `toolkit predict`. In several processes all call it, and
    all but the main one get an empty list. Raises UserError for a model that cannot be loaded.
    """
    decisions, found = _outputs(model, texts, **sizes)
    if decisions is None or found is None:
        return [{"prediction": title} for title in found or ()]
    return list(decisions.answers(found))


def evaluate(model: str | Path, texts: Sequence[str], truth: Sequence[Any], **sizes: int) -> dict[str, Any]:
    """The numbers of eval.jsonl, but for the loss, of a saved model on texts and what is true of them: class names,
    lists of them (multi-label), numbers, or titles. Each text counts once; otherwise as `predict`."""
    decisions, found = _outputs(model, texts, **sizes)
    if decisions is None or found is None:
        return title_metrics(found, truth) if found else {}
    table = Table(datasets.Dataset.from_dict({"label": list(truth)}), "texts", "")
    encoded = replace(decisions.labels, columns=("label",)).encode(table, np.arange(len(texts)))
    return classification_metrics(decisions.adjusted(found), encoded, decisions.labels)


def _outputs(
    model: str | Path, texts: Sequence[str], per_device_batch_size: int = 64, max_tokens: int | None = 16384
) -> tuple[Decisions | None, Any]:
    """(how it decides, its logits (N, C)), or (None, its titles); nothing found but on the main process."""
    saved = SavedModel(str(model))
    saved.load(launch.make_accelerator(), saved.length(None), per_device_batch_size, max_tokens)
    return saved.decisions, saved.outputs(saved.split(list(map(str, texts))))


def convert(checkpoint: str | Path, out: str | Path, **options: Any) -> list[str]:
    """`toolkit convert CHECKPOINT OUT`, with its options by name (`merge_lora=True`): the lines that it says."""
    return convert_checkpoint(ConvertSettings(Path(checkpoint), Path(out), **options))


def wait_for_all() -> None:
    """Returns when every process of this job has called it: the last line of what `notebook_launcher` runs."""
    if failure_detector.current is not None:
        failure_detector.current.wait_for_all(600)
