"""The model card: README.md of the saved model, with front matter for the Hugging Face hub."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from toolkit import __version__, demo
from toolkit.checkpoint.model_folder import read_step
from toolkit.data.jieba_tokenizer import is_jieba
from toolkit.evaluation import Evaluation
from toolkit.report.files import (
    METRICS,
    Record,
    architecture,
    is_local,
    without_folders,
    write_atomically,
)
from toolkit.report.templates import render

_FEW_SAMPLES = 30
# rows of the table of settings, where they are set
_HYPERPARAMETERS = (
    "optimizer", "learning_rate", "lr_scheduler_type", "warm-up", "optimizer steps", "global_batch_size",
    "max_tokens_per_batch", "weight_decay", "max_grad_norm", "label_smoothing_factor", "loss", "focal_gamma",
    "class_weights", "pos_weight", "sampling", "dropout", "LoRA", "num_hidden_layers", "teacher", "min_length",
    "max_length", "max_target_length", "layerwise_lr_decay", "freeze_layers", "reinit_layers", "ema_decay",
    "r_drop_alpha", "fgm_epsilon", "num_beams", "length_penalty", "no_repeat_ngram_size", "mixed_precision", "seed",
    "processes", "device",
)  # fmt: skip


def write_card(model_folder: Path, run_folder: Path, last: Evaluation) -> None:
    """Writes `model_folder`/README.md atomically, from the files of the run and `last`, the evaluation of the saved
    model. Raises OSError if a file is missing or cannot be written."""
    record = Record.load(run_folder, last)
    settings, model_class = record.settings, architecture(model_folder)
    step = read_step(model_folder) or record.last_step or 0
    context = {
        "record": record,
        "last": last,
        "step": step,
        "architecture": model_class or record.config.get("model_class", "model"),
        "of_transformers": bool(model_class),
        "front_matter": _front_matter(record, bool(model_class)).to_yaml(),
        "title": _title(record),
        "task": record.data.get("pipeline_tag", "text-classification"),
        "toolkit_version": __version__,
        "jieba": settings.get("tokenizer") == "jieba" or is_jieba(model_folder),
        "source": demo.demo_entry(settings.get("dataset_name")).description or record.data_name,
        "notes": _notes(record),
        "hyperparameters": _hyperparameters(record, run_folder),
        "few_samples": _FEW_SAMPLES,
        "licences": {
            "base model": demo.demo_entry(settings["model_name_or_path"]).note,
            "data": demo.demo_entry(settings.get("dataset_name")).note,
        },
        **_limits(record),
    }
    write_atomically(model_folder / "README.md", [render("card.md", context)])


def _title(record: Record) -> str:
    return f"{record.base_model.rsplit('/', 1)[-1]} fine-tuned on {record.data_name}"


def _front_matter(record: Record, of_transformers: bool) -> ModelCardData:
    """The YAML that the hub reads; without local paths, and without a licence, which we do not know."""
    hub_data, base = record.settings.get("dataset_name"), str(record.settings["model_name_or_path"])
    if hub_data and (hub_data.startswith(demo.PREFIX) or is_local(hub_data)):
        hub_data = None
    task = record.data.get("pipeline_tag", "text-classification")
    results = [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").title(),
            dataset_type=hub_data or "custom",
            dataset_name=record.data_name,
            dataset_split=record.last.split,
            metric_name=name if name.startswith("rouge") else record.metric_title(name),
            metric_value=round(value, 6),
            **_hub_metric(name, record.last.numbers.get("rouge_segmenter")),
        )
        for name in METRICS
        # YAML parsers disagree on NaN
        if name != "loss" and isinstance(value := record.last.numbers.get(name), float) and math.isfinite(value)
    ]  # fmt: skip
    return ModelCardData(
        base_model=None if is_local(base) else demo.demo_entry(base).origin or base,
        library_name="transformers" if of_transformers else None, pipeline_tag=task, tags=["finetune-toolkit"],
        datasets=[hub_data] if hub_data else None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None, model_name=_title(record),
        eval_results=results or None,
    )  # fmt: skip


def _hub_metric(name: str, segmenter: str | None) -> dict[str, Any]:
    """The hub's name and arguments of a metric."""
    if name.startswith("rouge"):
        return {
            "metric_type": "rouge",
            "metric_args": {"tokenizer": segmenter} if segmenter != "word" else None,
        }
    kind, _, average = name.partition("_")
    options = {"average": average} if average else None
    return {"metric_type": kind.replace("pearson", "pearsonr"), "metric_args": options}


def _notes(record: Record) -> list[str]:
    """The notes on the data, with file names instead of paths."""
    names = ("train_file", "validation_file", "test_file", "dataset_name")
    notes = record.data.get("notes", [])
    for path in filter(None, map(record.settings.get, names)):
        notes = [note.replace(path, Path(path).name) for note in notes]
    return notes


def _hyperparameters(record: Record, run_folder: Path) -> dict[str, Any]:
    settings, data, world = record.settings, record.data, record.config["world"]
    ratio, steps = settings.get("warmup_ratio"), record.cost["steps"]
    values = settings | {
        "optimizer": record.config.get("optimizer", "AdamW"),
        "warm-up": f"{settings.get('warmup_steps') or 0} steps"
        if ratio is None
        else f"{ratio:g} of all steps",
        "optimizer steps": f"{steps} of {data['total_steps']}, {data['steps_per_epoch']} an epoch",
        "label_smoothing_factor": settings.get("label_smoothing_factor") or None,
        "loss": "focal" if settings.get("loss") == "focal" else None,
        "no_repeat_ngram_size": settings.get("no_repeat_ngram_size") or None,
        "teacher": settings.get("teacher")
        and without_folders(str(settings["teacher"]).removesuffix("/model")),
        "LoRA": _lora(run_folder / "adapter") if settings.get("lora_r") else None,
        "max_length": data["max_length"],
        "mixed_precision": world["mixed_precision"],
        "processes": world["num_processes"],
        "device": world["device"],
    }
    return {name: values[name] for name in _HYPERPARAMETERS if values.get(name) is not None}


def _lora(adapter: Path) -> str:
    """`r=8, alpha=16, dropout 0, on query, value; merged into the weights here`."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    numbers = f"r={config['r']}, alpha={config['lora_alpha']}, dropout {config['lora_dropout']:g}"
    return (
        f"{numbers}, on {', '.join(sorted(config['target_modules']))}; merged into the weights here"
    )


def _limits(record: Record) -> dict[str, Any]:
    """Variables of the section "Limits"."""
    last, classes = record.last, record.last.numbers.get("per_class", {})
    return {
        "chosen_by": record.metric_title(record.best.metric)
        if last.split == "validation"
        else None,
        "few": last.numbers["num_samples"] < _FEW_SAMPLES,
        "rare": [name for name, scores in classes.items() if scores["support"] < _FEW_SAMPLES],
    }
