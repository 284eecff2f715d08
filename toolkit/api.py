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
from toolkit.config import TASKS, ModelSettings, build
from toolkit.data.prepare import split_of_texts
from toolkit.data.read import Table
from toolkit.data.tokens import choose_max_length, load_tokenizer
from toolkit.errors import UserError, did_you_mean
from toolkit.evaluation import classification_metrics, outputs
from toolkit.evaluation.decisions import Decisions, saved_decisions
from toolkit.evaluation.predict_file import labels_of
from toolkit.evaluation.titles import generate_titles, title_metrics
from toolkit.launch import failure_detector
from toolkit.models import title_model
from toolkit.models.classifier import load_saved_classifier
from toolkit.pretrained import load_config


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
    accelerator, named = launch.make_accelerator(), ModelSettings(model_name_or_path=str(model))
    tokenizer, writes = load_tokenizer(named), load_config(named).model_type == title_model.KIND
    loaded = title_model.load_saved_title_model(named) if writes else load_saved_classifier(named)
    length = choose_max_length(None, tokenizer, loaded.config)
    split = split_of_texts("texts", tokenizer, loaded.config, length, list(map(str, texts)))
    prepared = accelerator.prepare_model(loaded, evaluation_mode=True)
    predicts: Any = generate_titles if writes else outputs.predict
    found = predicts(accelerator, prepared, split, tokenizer, per_device_batch_size, max_tokens)
    return None if writes else saved_decisions(str(model), labels_of(loaded.config)), found


def convert(checkpoint: str | Path, out: str | Path, **options: Any) -> list[str]:
    """`toolkit convert CHECKPOINT OUT`, with its options by name (`merge_lora=True`): the lines that it says."""
    return convert_checkpoint(ConvertSettings(Path(checkpoint), Path(out), **options))


def wait_for_all() -> None:
    """Returns when every process of this job has called it: the last line of what `notebook_launcher` runs."""
    if failure_detector.current is not None:
        failure_detector.current.wait_for_all(600)
