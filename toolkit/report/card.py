"""The model card: README.md of the saved model, with front matter for the Hugging Face hub."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from toolkit import __version__, demo
from toolkit.checkpoint.model_folder import read_step
from toolkit.data.jieba_tokenizer import is_jieba
from toolkit.evaluation import Evaluation
from toolkit.report.files import write_atomically
from toolkit.report.model_class import architecture
from toolkit.report.record import METRICS, Record, is_local, without_folders
from toolkit.report.templates import render

_FEW_SAMPLES = 30
# rows of the table of settings, where they are set
_HYPERPARAMETERS = (
    "optimizer", "learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps",
    "optimizer steps", "global_batch_size", "max_tokens_per_batch", "weight_decay",
    "max_grad_norm", "label_smoothing_factor", "loss", "focal_gamma", "class_weights", "pos_weight",
    "sampling", "dropout", "LoRA", "num_hidden_layers", "teacher",
    "max_length", "max_target_length", "layerwise_lr_decay", "freeze_layers",
    "reinit_layers", "ema_decay", "r_drop_alpha", "fgm_epsilon", "num_beams", "length_penalty",
    "no_repeat_ngram_size", "mixed_precision", "seed", "processes", "device",
)  # fmt: skip


def write_card(model_folder: Path, run_folder: Path, last: Evaluation) -> None:
    """Writes `model_folder`/README.md atomically, from the files of the run and `last`, the
    evaluation of the saved model. Raises OSError if a file is missing or cannot be written."""
    record = Record.load(run_folder, last)
    settings = record.settings
    model_class = architecture(model_folder)
    data = demo.demo_entry(settings.get("dataset_name"))
    context = {
        "record": record,
        "last": last,
        "step": read_step(model_folder) or record.last_step or 0,
        "architecture": model_class or record.config.get("model_class", "model"),
        "of_transformers": bool(model_class),
        "front_matter": _front_matter(record, bool(model_class)).to_yaml(),
        "title": _title(record),
        "task": _task(record),
        "toolkit_version": __version__,
        "jieba": settings.get("tokenizer") == "jieba" or is_jieba(model_folder),
        "source": data.description or record.data_name,
        "notes": _notes(record),
        "hyperparameters": _hyperparameters(record),
        "few_samples": _FEW_SAMPLES,
        "licences": {
            "base model": demo.demo_entry(settings["model_name_or_path"]).note,
            "data": data.note,
        },
        **_limits(record),
    }
    write_atomically(model_folder / "README.md", [render("card.md", context)])


def _title(record: Record) -> str:
    return f"{record.base_model.rsplit('/', 1)[-1]} fine-tuned on {record.data_name}"


def _task(record: Record) -> str:
    return str(record.data.get("pipeline_tag", "text-classification"))


def _front_matter(record: Record, of_transformers: bool) -> ModelCardData:
    """The YAML that the hub reads; without local paths, and without a licence, which we do not
    know."""
    data = record.settings.get("dataset_name")
    if data and (data.startswith(demo.PREFIX) or is_local(data)):
        data = None
    base = str(record.settings["model_name_or_path"])
    base_model = None if is_local(base) else demo.demo_entry(base).origin or base
    results = _results(record, data or "custom")
    metrics = list(dict.fromkeys(result.metric_type for result in results))
    return ModelCardData(
        base_model=base_model,
        library_name="transformers" if of_transformers else None,
        pipeline_tag=_task(record),
        tags=["finetune-toolkit"],
        datasets=[data] if data else None,
        metrics=metrics or None,
        model_name=_title(record),
        eval_results=results or None,
    )


def _results(record: Record, data: str) -> list[EvalResult]:
    numbers = record.last.numbers
    task = _task(record)
    results = []
    for name in METRICS:
        value = numbers.get(name)
        # YAML parsers disagree on NaN
        if name == "loss" or not isinstance(value, float) or not math.isfinite(value):
            continue
        result = EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").title(),
            dataset_type=data,
            dataset_name=record.data_name,
            dataset_split=record.last.split,
            metric_name=name if name.startswith("rouge") else record.metric_title(name),
            metric_value=round(value, 6),
            **_hub_metric(name, numbers.get("rouge_segmenter")),
        )
        results.append(result)
    return results


def _hub_metric(name: str, segmenter: str | None) -> dict[str, Any]:
    """The hub's name and arguments of a metric."""
    if name.startswith("rouge"):
        return {"metric_type": "rouge", "metric_args": {"tokenizer": segmenter}}
    kind, _, average = name.partition("_")
    options = {"average": average} if average else None
    return {"metric_type": kind.replace("pearson", "pearsonr"), "metric_args": options}


def _notes(record: Record) -> list[str]:
    """The notes on the data, with file names instead of paths."""
    notes = list(record.data.get("notes", []))
    for name in ("train_file", "validation_file", "test_file", "dataset_name"):
        path = record.settings.get(name)
        if path:
            notes = [note.replace(path, Path(path).name) for note in notes]
    return notes


def _hyperparameters(record: Record) -> dict[str, Any]:
    settings = record.settings
    data = record.data
    world = record.config["world"]
    steps = f"{record.cost['steps']} of {data['total_steps']}, {data['steps_per_epoch']} an epoch"
    values = {
        **settings,
        "optimizer": record.config.get("optimizer", "AdamW"),
        "optimizer steps": steps,
        "max_length": data["max_length"],
        "mixed_precision": world["mixed_precision"],
        "processes": world["num_processes"],
        "device": world["device"],
    }
    teacher = settings.get("teacher")
    if teacher:
        values["teacher"] = without_folders(str(teacher).removesuffix("/model"))
    rank = settings.get("lora_r")
    if rank:
        alpha = settings.get("lora_alpha") or 2 * rank
        values["LoRA"] = f"r={rank}, alpha={alpha}, merged into the weights here"
    return {name: values[name] for name in _HYPERPARAMETERS if values.get(name) is not None}


def _limits(record: Record) -> dict[str, Any]:
    """Variables of the section "Limits"."""
    numbers = record.last.numbers
    classes = numbers.get("per_class", {})
    chosen_by = None
    if record.last.split == "validation":
        chosen_by = record.metric_title(record.best.metric)
    return {
        "chosen_by": chosen_by,
        "few": numbers["num_samples"] < _FEW_SAMPLES,
        "rare": [name for name in classes if classes[name]["support"] < _FEW_SAMPLES],
    }
