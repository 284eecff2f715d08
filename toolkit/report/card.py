"""The model card: README.md of the saved model, with front matter for the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from toolkit import __version__, demo
from toolkit.data.jieba_tokenizer import is_jieba
from toolkit.evaluation import Evaluation
from toolkit.report.files import write_atomically
from toolkit.report.model_class import architecture
from toolkit.report.record import Record, hub_name, metric_title, public_name, results
from toolkit.report.templates import render

# metric -> its name on the hub
_HUB_METRICS = {
    "accuracy": "accuracy",
    "f1_macro": "f1",
    "f1_micro": "f1",
    "f1_weighted": "f1",
    "mse": "mse",
    "mae": "mae",
    "pearson": "pearsonr",
    "rouge1": "rouge",
    "rouge2": "rouge",
    "rougeL": "rouge",
}
# rows of the table of settings, where they are set
_HYPERPARAMETERS = (
    "optimizer", "learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps",
    "optimizer steps", "global_batch_size", "weight_decay", "max_grad_norm", "dropout", "loss",
    "class_weights", "pos_weight", "sampling", "label_smoothing_factor", "teacher", "lora_r",
    "lora_alpha", "num_hidden_layers", "ema_decay", "max_length", "max_target_length", "num_beams",
    "mixed_precision", "seed", "processes", "device",
)  # fmt: skip


def write_card(model_folder: Path, run_folder: Path, step: int | None = None) -> None:
    """Writes `model_folder`/README.md atomically, from the files of the run; `step`: that of the
    saved model, by default that of the last evaluation."""
    record = Record.load(run_folder)
    settings = record.settings
    last = record.evaluation_at(step)
    data = demo.demo_entry(settings.get("dataset_name"))
    model_class = architecture(model_folder)
    task = str(record.data.get("pipeline_tag", "text-classification"))
    title = f"{record.base_model.rsplit('/', 1)[-1]} fine-tuned on {record.data_name}"
    dataset = hub_name(settings.get("dataset_name"))
    evaluated = _results(record, last, task, dataset or "custom")
    # without a licence, which we do not know
    front_matter = ModelCardData(
        base_model=hub_name(settings["model_name_or_path"]),
        library_name="transformers" if model_class else None,
        pipeline_tag=task,
        tags=["finetune-toolkit"],
        datasets=[dataset] if dataset else None,
        metrics=list(dict.fromkeys(result.metric_type for result in evaluated)) or None,
        model_name=title,
        eval_results=evaluated or None,
    )
    context = {
        "front_matter": front_matter.to_yaml(),
        "record": record,
        "last": last,
        "results": results(last.numbers),
        "model_class": model_class,
        "title": title,
        "task": task,
        "toolkit_version": __version__,
        "jieba": settings.get("tokenizer") == "jieba" or is_jieba(model_folder),
        "source": data.description or record.data_name,
        "hyperparameters": _hyperparameters(record),
        "licences": {
            "base model": demo.demo_entry(settings["model_name_or_path"]).note,
            "data": data.note,
        },
    }
    write_atomically(model_folder / "README.md", [render("card.md", context)])


def _results(record: Record, last: Evaluation, task: str, dataset: str) -> list[EvalResult]:
    evaluated = []
    for metric, hub_type in _HUB_METRICS.items():
        value = last.numbers.get(metric)
        if value is not None:  # null: not finite
            result = EvalResult(
                task_type=task,
                dataset_type=dataset,
                dataset_name=record.data_name,
                dataset_split=last.split,
                metric_type=hub_type,
                metric_name=metric_title(metric),
                metric_value=round(value, 6),
            )
            evaluated.append(result)
    return evaluated


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
    teacher = values.get("teacher")
    if teacher:
        values["teacher"] = public_name(str(teacher).removesuffix("/model"))
    return {name: values[name] for name in _HYPERPARAMETERS if values.get(name) is not None}
