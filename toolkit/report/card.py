"""The model card: README.md of the saved model, with front matter for the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from toolkit import __version__
from toolkit.data.jieba_tokenizer import MARK
from toolkit.report.files import write_atomically
from toolkit.report.model_class import architecture
from toolkit.report.record import Record, hub_name, results
from toolkit.report.templates import render
from toolkit.utils.files import read_json_object

_TOKENIZER = "tokenizer_config.json"
# rows of the table of settings, where they are set
_HYPERPARAMETERS = (
    "optimizer", "learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps",
    "optimizer steps", "global_batch_size", "weight_decay", "max_grad_norm", "dropout", "loss",
    "class_weights", "pos_weight", "sampling", "label_smoothing_factor", "lora_r",
    "lora_alpha", "num_hidden_layers", "ema_decay", "max_length", "max_target_length", "num_beams",
    "mixed_precision", "seed", "processes", "device",
)  # fmt: skip


def write_card(model_folder: Path, run_folder: Path, step: int | None = None) -> None:
    """Writes `model_folder`/README.md atomically, from the files of the run; `step`: that of the
    saved model, by default that of the last evaluation."""
    record = Record.load(run_folder)
    settings = record.settings
    last = record.evaluation_at(step)
    model_class = architecture(model_folder)
    task = str(record.data.get("pipeline_tag", "text-classification"))
    dataset = hub_name(settings.get("dataset_name"))
    metrics = results(last.numbers)
    tokenizer: dict[str, Any] = {}
    if (model_folder / _TOKENIZER).is_file():  # a user's own may have none
        tokenizer = read_json_object(model_folder / _TOKENIZER)
    # without a licence, which we do not know
    front_matter = ModelCardData(
        base_model=hub_name(settings["model_name_or_path"]),
        library_name="transformers" if model_class else None,
        pipeline_tag=task,
        tags=["finetune-toolkit"],
        datasets=[dataset] if dataset else None,
        metrics=list(metrics) or None,
    )
    context = {
        "front_matter": front_matter.to_yaml(),
        "record": record,
        "last": last,
        "results": metrics,
        "model_class": model_class,
        "self_test": (model_folder / "self_test.json").is_file(),
        "task": task,
        "toolkit_version": __version__,
        "tokenizer": tokenizer,
        "jieba": settings.get("tokenizer") == "jieba" or MARK in tokenizer,
        "hyperparameters": _hyperparameters(record),
    }
    write_atomically(model_folder / "README.md", [render("card.md", context)])


def _hyperparameters(record: Record) -> dict[str, Any]:
    data, world = record.data, record.config["world"]
    values = {
        **record.settings,
        "optimizer": record.config.get("optimizer"),
        "optimizer steps": f"{len(record.steps)} of {data['total_steps']}",
        "max_length": data["max_length"],
        "mixed_precision": world["mixed_precision"],
        "processes": world["num_processes"],
        "device": world["device"],
    }
    return {name: values[name] for name in _HYPERPARAMETERS if values.get(name) is not None}
