"""The model card: README.md of the saved model, with front matter that the Hugging Face hub reads."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from toolkit import __version__
from toolkit.config import ProblemType, TaskSettings
from toolkit.data import demo
from toolkit.data.prepare import TaskData
from toolkit.evaluation import Evaluation
from toolkit.evaluation.metrics import best_metric
from toolkit.report.files import last_step, write_whole

_TITLES = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "f1_macro": "F1 (macro)",
    "f1_micro": "F1 (micro)",
    "f1_weighted": "F1 (weighted)",
    "mse": "Mean squared error",
    "mae": "Mean absolute error",
    "pearson": "Pearson correlation",
}
# our name -> (the hub's name of the metric, its arguments)
_HUB_METRICS: dict[str, tuple[str, dict[str, str] | None]] = {
    "accuracy": ("accuracy", None),
    "f1_macro": ("f1", {"average": "macro"}),
    "f1_micro": ("f1", {"average": "micro"}),
    "f1_weighted": ("f1", {"average": "weighted"}),
    "mse": ("mse", None),
    "mae": ("mae", None),
    "pearson": ("pearsonr", None),
}
_KINDS: dict[ProblemType, str] = {
    "single_label_classification": "gives each text one of {size} classes",
    "multi_label_classification": "gives each text any number of {size} labels, each with a probability of its own",
    "regression": "gives each text a number (`{name}`)",
}
_MOST_LABELS = 100
_FEW_SAMPLES = 30


def write_card(model_folder: Path, run_folder: Path, settings: TaskSettings, data: TaskData, last: Evaluation) -> None:
    """Writes `model_folder`/README.md, whole or not at all.

    `run_folder` holds the run's config.json, metrics.jsonl and eval.jsonl; `last` is the evaluation of
    the saved model. Raises OSError where a file is missing or cannot be written.
    """
    context = {
        "front_matter": front_matter(model_folder, settings, data, last).to_yaml(),
        "toolkit_version": __version__,
        "architecture": _architecture(model_folder),
        "kind": _KINDS[data.labels.problem_type].format(size=data.labels.size, name=data.labels.names[0]),
        "base": base_name(str(settings.model.model_name_or_path)),
        "title": _model_name(settings),
        "model_path": json.dumps(str(model_folder), ensure_ascii=False),
        "labels": list(data.labels.names[:_MOST_LABELS]),
        "labels_left_out": max(0, data.labels.size - _MOST_LABELS),
        "problem_type": data.labels.problem_type,
        "max_length": data.max_length,
        "source": demo.description_of(str(settings.data.dataset_name)) or data_name(settings),
        "sizes": {split.name: len(split) for split in (data.train, data.validation, data.test) if split},
        "notes": _notes(settings, data),
        "results": results(last, data.labels.problem_type),
        "per_class": last.numbers.get("per_class", {}),
        "last": last,
        "limits": _limits(settings, data, last),
        **_story(run_folder, settings),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown: `cell` escapes what came from the data
    )
    environment.filters |= {"cell": cell, "number": number}
    write_whole(model_folder / "README.md", [environment.get_template("card.md").render(context)])


def front_matter(model_folder: Path, settings: TaskSettings, data: TaskData, last: Evaluation) -> ModelCardData:
    """What the hub reads; a local folder is no name there and is left out, as is a licence, which we do not know."""
    hub_data = settings.data.dataset_name
    if hub_data and (hub_data.startswith(demo.PREFIX) or Path(hub_data).exists()):
        hub_data = None
    evaluated = [
        EvalResult(
            task_type="text-classification",
            task_name="Text Classification",
            dataset_type=hub_data or "custom",
            dataset_name=data_name(settings),
            dataset_split=last.split,
            metric_type=_HUB_METRICS[name][0],
            metric_name=metric_title(name, data.labels.problem_type),
            metric_args=_HUB_METRICS[name][1],
            metric_value=round(value, 6),
        )
        for name, value in last.numbers.items()
        # YAML readers disagree on what a NaN is
        if name in _HUB_METRICS and math.isfinite(value)
    ]
    base = str(settings.model.model_name_or_path)
    return ModelCardData(
        base_model=None if Path(base).exists() else demo.origin_of(base) or base,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["finetune-toolkit"],
        datasets=[hub_data] if hub_data else None,
        metrics=list(dict.fromkeys(result.metric_type for result in evaluated)) or None,
        model_name=_model_name(settings),
        eval_results=evaluated or None,
    )


def results(last: Evaluation, problem_type: ProblemType) -> dict[str, float]:
    """The evaluation's single numbers by title, without the counts."""
    numbers = {name: value for name, value in last.numbers.items() if isinstance(value, float)}
    if problem_type == "single_label_classification":
        numbers.pop("f1_micro", None)  # the accuracy once more
    return {metric_title(name, problem_type): value for name, value in numbers.items()}


def metric_title(name: str, problem_type: str | None) -> str:
    """`f1_macro` -> `F1 (macro)`; for several labels, accuracy counts exact sets only and says so."""
    if name == "accuracy" and problem_type == "multi_label_classification":
        return "Accuracy (all labels right)"
    return _TITLES.get(name, name.replace("_", " "))


def base_name(name_or_path: str) -> str:
    """A base model's name for readers elsewhere: demo names become what they stand for, paths their last part."""
    if origin := demo.origin_of(name_or_path):
        return origin
    return Path(name_or_path).resolve().name if Path(name_or_path).exists() else name_or_path


def data_name(settings: TaskSettings) -> str:
    """The data set's name, or the training file's without its folders."""
    data = settings.data
    if data.dataset_name:
        name = data.dataset_name.removeprefix(demo.PREFIX)
        name = Path(name).resolve().name if Path(name).exists() else name
        return f"{name} ({data.dataset_config_name})" if data.dataset_config_name else name
    return Path(str(data.train_file)).name


def cell(value: object) -> str:
    """Text from the data, safe in a Markdown table: no markup, no line breaks, no column marks."""
    text = html.escape(" ".join(str(value).split()), quote=False)
    # an underscore inside a word is no markup
    return re.sub(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)


def number(value: Any) -> str:
    """`7677` -> `7,677`, `0.745603` -> `0.7456`, `5e-05` -> `5e-05`; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def _model_name(settings: TaskSettings) -> str:
    base = base_name(str(settings.model.model_name_or_path)).rsplit("/", 1)[-1]
    return f"{base} fine-tuned on {data_name(settings)}"


def _architecture(model_folder: Path) -> str:
    loaded = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    return str((loaded.get("architectures") or ["model"])[0])


def _story(run_folder: Path, settings: TaskSettings) -> dict[str, Any]:
    """What happened, from the run's files."""
    config = json.loads((run_folder / "config.json").read_text(encoding="utf-8"))
    return {
        "saved_step": last_step(run_folder / "eval.jsonl"),
        "hyperparameters": _hyperparameters(
            settings, config, last_step(run_folder / "metrics.jsonl"), _lora(run_folder, settings)
        ),
        "versions": {name: version for name, version in config["versions"].items() if version},
        "started": config["started"][:10],
    }


def _notes(settings: TaskSettings, data: TaskData) -> list[str]:
    """What was noticed while reading, with files by their names: folders say nothing elsewhere."""
    sources = settings.data
    paths = (sources.train_file, sources.validation_file, sources.test_file, sources.dataset_name)
    notes = list(data.notes)
    for path in paths:
        if path and Path(path).exists():
            notes = [note.replace(path, Path(path).resolve().name) for note in notes]
    return notes


def _lora(run_folder: Path, settings: TaskSettings) -> str | None:
    """`r=8, alpha=16, dropout 0, on query, value; merged into the weights here`."""
    if not settings.model.lora_r:
        return None
    own = json.loads((run_folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    layers = ", ".join(sorted(own["target_modules"]))
    numbers = f"r={own['r']}, alpha={own['lora_alpha']}, dropout {own['lora_dropout']:g}"
    return f"{numbers}, on {layers}; merged into the weights here"


def _hyperparameters(settings: TaskSettings, config: dict[str, Any], steps: int, lora: str | None) -> dict[str, Any]:
    training, world = settings.training, config["world"]
    warmup = f"{training.warmup_steps or 0} steps"
    if training.warmup_ratio is not None:
        warmup = f"{training.warmup_ratio:g} of all steps"
    chosen: dict[str, Any] = {
        "optimizer": "AdamW",
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler_type,
        "warm-up": warmup,
        "optimizer steps": f"{steps} of {config['data']['total_steps']}, {config['data']['steps_per_epoch']} an epoch",
        "global_batch_size": training.global_batch_size,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "label_smoothing_factor": training.label_smoothing_factor or None,
        "dropout": settings.model.dropout,
        "LoRA": lora,
        "max_length": config["data"]["max_length"],
        "mixed_precision": world["mixed_precision"],
        "seed": training.seed,
        "processes": world["num_processes"],
        "device": world["device"],
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _limits(settings: TaskSettings, data: TaskData, last: Evaluation) -> list[str]:
    """Only what follows from the run itself."""
    metric, _ = best_metric(settings.training.metric_for_best_model, data.labels.problem_type)
    limits = [f"It reads the first {data.max_length} tokens of a text; what follows is cut off."]
    if data.labels.problem_type == "single_label_classification":
        limits.append("It answers with one of its classes for every text, also for texts that belong to none of them.")
    if last.split == "validation":
        title = metric_title(metric, data.labels.problem_type)
        limits.append(
            f"The step to keep was chosen by {title} on the same validation samples that the results above are of: "
            "expect somewhat worse on new texts."
        )
    limits += [*_uncertainty(last, data.labels.problem_type), *_rare(last)]
    limits.append(
        "It was evaluated on nothing but the data named above: how it does on other sources, domains or languages, "
        "and whether it treats groups of people alike, has not been measured."
    )
    note = demo.note_of(str(settings.model.model_name_or_path))
    return [*limits, *([f"Licence of the base model: {note}."] if note else [])]


def _uncertainty(last: Evaluation, problem_type: ProblemType) -> list[str]:
    """The 95 % range of the accuracy, by the normal approximation of the binomial distribution."""
    count, accuracy = last.numbers["num_samples"], last.numbers.get("accuracy")
    if accuracy is None or not 0 < accuracy < 1 or count < _FEW_SAMPLES:
        return [] if count >= _FEW_SAMPLES else [f"The results are of {count} samples only: take them as a hint."]
    margin = 196 * math.sqrt(accuracy * (1 - accuracy) / count)
    title = metric_title("accuracy", problem_type)
    return [f"{title} is of {count:,} samples, so it is known to about ±{margin:.1f} percentage points (95 %)."]


def _rare(last: Evaluation) -> list[str]:
    rare = [name for name, own in last.numbers.get("per_class", {}).items() if own["support"] < _FEW_SAMPLES]
    if not rare:
        return []
    named = ", ".join(cell(name) for name in rare[:10]) + (f" and {len(rare) - 10} more" if len(rare) > 10 else "")
    return [f"Classes with fewer than {_FEW_SAMPLES} samples in {last.split}, whose own numbers say little: {named}."]
