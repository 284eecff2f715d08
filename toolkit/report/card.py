"""The model card: README.md of the saved model, with front matter that the Hugging Face hub reads."""

from __future__ import annotations

import html
import json
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from toolkit import __version__, demo
from toolkit.config import ModelSettings, Task, TaskSettings, TitleSettings, flat
from toolkit.data.jieba_tokenizer import is_jieba
from toolkit.data.prepare import Prepared, TaskData, TitleData
from toolkit.evaluation import Evaluation
from toolkit.evaluation.best import Best
from toolkit.report.files import last_step, read_lines, write_whole

# our name -> (what readers see, the hub's name of the metric, its arguments there)
METRICS: dict[str, tuple[str, str, dict[str, str] | None]] = {
    "loss": ("Loss", "", None),
    "accuracy": ("Accuracy", "accuracy", None),
    "f1_macro": ("F1 (macro)", "f1", {"average": "macro"}),
    "f1_micro": ("F1 (micro)", "f1", {"average": "micro"}),
    "f1_weighted": ("F1 (weighted)", "f1", {"average": "weighted"}),
    "mse": ("Mean squared error", "mse", None),
    "mae": ("Mean absolute error", "mae", None),
    "pearson": ("Pearson correlation", "pearsonr", None),
    "rouge1": ("ROUGE-1", "rouge", None),
    "rouge2": ("ROUGE-2", "rouge", None),
    "rougeL": ("ROUGE-L", "rouge", None),
}
READINGS_EXPLAINED = (
    "What the length is worth: the same weights on the same samples, with the texts cut. It is not what a model "
    "trained on texts of that length would reach."
)
_COUNTED = {
    "word": "words (word: runs of a-z and 0-9 in lower case, not stemmed)",
    "jieba": "Chinese words (jieba: as jieba cuts them; Latin words and numbers are whole)",
    "char": "characters (char: Chinese ones; Latin words and numbers are whole)",
}
_MOST_LABELS = 100
_FEW_SAMPLES = 30
# what the table of settings shows, in this order, where it is set
_HYPERPARAMETERS = (
    "optimizer", "learning_rate", "lr_scheduler_type", "warm-up", "optimizer steps", "global_batch_size",
    "max_tokens_per_batch", "weight_decay", "max_grad_norm", "label_smoothing_factor", "dropout", "LoRA", "min_length",
    "max_length", "max_target_length", "num_beams", "length_penalty", "no_repeat_ngram_size", "mixed_precision", "seed",
    "processes", "device",
)  # fmt: skip

Settings = TaskSettings | TitleSettings


def write_card(model_folder: Path, run_folder: Path, settings: Settings, data: Prepared, last: Evaluation) -> None:
    """Writes `model_folder`/README.md, whole or not at all.

    `run_folder` holds the run's config.json, metrics.jsonl, eval.jsonl and predictions.jsonl; `last` is the
    evaluation of the saved model. Raises OSError where a file is missing or cannot be written.
    """
    problem_type: Task = data.facts["problem_type"]
    context = {
        "front_matter": front_matter(model_folder, settings, data, last).to_yaml(),
        "toolkit_version": __version__,
        "architecture": _architecture(model_folder),
        "labels": data.labels.names if isinstance(data, TaskData) else (),
        "most_labels": _MOST_LABELS,
        "titles": data.titles if isinstance(data, TitleData) else None,
        "base": base_name(str(settings.model.model_name_or_path)),
        "title": _model_name(settings),
        "model_path": json.dumps(str(model_folder), ensure_ascii=False),
        "jieba": settings.model.tokenizer == "jieba" or is_jieba(model_folder),
        "problem_type": problem_type,
        "max_length": data.max_length,
        "source": demo.description_of(str(settings.data.dataset_name)) or data_name(settings),
        "sizes": data.sizes,
        "notes": _notes(settings, data),
        "results": results(last, problem_type),
        "rouge_explained": explain_rouge(last),
        "readings_explained": READINGS_EXPLAINED,
        "per_class": last.numbers.get("per_class", {}),
        "last": last,
        **_limits(run_folder, settings, problem_type, last),
        **_story(run_folder, settings, data, last),
    }
    # Markdown: `cell` escapes what came from the data
    card = render("card.md", context, autoescape=False, cell=cell, keep_trailing_newline=True)
    write_whole(model_folder / "README.md", [card])


def render(
    template: str, context: dict[str, Any], autoescape: bool, keep_trailing_newline: bool = False, **filters: Any
) -> str:
    """A template of this folder; `number` and `filters` are its filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=keep_trailing_newline,
        autoescape=autoescape,
    )
    environment.filters |= {"number": number, **filters}
    return environment.get_template(template).render(context)


def front_matter(model_folder: Path, settings: Settings, data: Prepared, last: Evaluation) -> ModelCardData:
    """What the hub reads; a local folder is no name there and is left out, as is a licence, which we do not know."""
    hub_data = settings.data.dataset_name
    if hub_data and (hub_data.startswith(demo.PREFIX) or Path(hub_data).exists()):
        hub_data = None
    problem_type: Task = data.facts["problem_type"]
    task = "summarization" if problem_type == "title_generation" else "text-classification"
    evaluated = [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").title(),
            dataset_type=hub_data or "custom",
            dataset_name=data_name(settings),
            dataset_split=last.split,
            metric_type=METRICS[name][1],
            metric_name=name if name.startswith("rouge") else metric_title(name, problem_type),
            metric_args=METRICS[name][2] or _segmenter(name, last),
            metric_value=round(value, 6),
        )
        for name, value in last.numbers.items()
        # YAML readers disagree on what a NaN is
        if name in METRICS and METRICS[name][1] and math.isfinite(value)
    ]
    base = str(settings.model.model_name_or_path)
    return ModelCardData(
        base_model=None if Path(base).exists() else demo.origin_of(base) or base,
        library_name="transformers" if _architecture(model_folder) else None,
        pipeline_tag=task,
        tags=["finetune-toolkit"],
        datasets=[hub_data] if hub_data else None,
        metrics=list(dict.fromkeys(result.metric_type for result in evaluated)) or None,
        model_name=_model_name(settings),
        eval_results=evaluated or None,
    )


def _segmenter(name: str, last: Evaluation) -> dict[str, str] | None:
    """What the hub's metric must be told to count the same."""
    own = last.numbers.get("rouge_segmenter", "word")
    return {"tokenizer": own} if name.startswith("rouge") and own != "word" else None


def results(last: Evaluation, problem_type: Task) -> dict[str, float]:
    """The evaluation's single numbers by title, without the counts."""
    numbers = {name: value for name, value in last.numbers.items() if isinstance(value, float)}
    if problem_type == "single_label_classification":
        numbers.pop("f1_micro", None)  # the accuracy once more
    return {metric_title(name, problem_type): value for name, value in numbers.items()}


def metric_title(name: str, problem_type: str | None) -> str:
    """`f1_macro` -> `F1 (macro)`; for several labels, accuracy counts exact sets only and says so."""
    if name == "accuracy" and problem_type == "multi_label_classification":
        return "Accuracy (all labels right)"
    if name == "loss" and problem_type == "title_generation":
        return "Loss (of a title's token)"
    return METRICS[name][0] if name in METRICS else name.replace("_", " ")


def explain_rouge(last: Evaluation) -> str:
    """What the numbers are, or nothing where there is no ROUGE."""
    segmenter = last.numbers.get("rouge_segmenter")
    if segmenter is None:
        return ""
    return (
        f"ROUGE was counted in {_COUNTED[segmenter]}: F-measures from 0 to 1 of what a title shares with its reference "
        "(single ones, pairs, the longest sequence). Numbers counted in anything else cannot be compared with these."
    )


def is_comparison(line: dict[str, Any]) -> bool:
    """Whether a line of eval.jsonl is of texts cut on purpose: no result of the run, no candidate for the best."""
    return "max_length" in line


def readings(
    lines: Iterable[dict[str, Any]], step: int | None, max_length: int, last: Evaluation
) -> list[tuple[int, Evaluation]]:
    """(tokens read of each text, what came of it) of the model of `step`, the run's own length first.

    `lines` are those of eval.jsonl; empty where none is a comparison of that step.
    """
    others = {
        line["max_length"]: Evaluation(line["split"], line, None)
        for line in lines
        if is_comparison(line) and line["step"] == step
    }
    return [(max_length, last), *sorted(others.items(), reverse=True)] if others else []


def base_name(name_or_path: str) -> str:
    """A base model's name for readers elsewhere: demo names become what they stand for, paths their last part."""
    if origin := demo.origin_of(name_or_path):
        return origin
    return Path(name_or_path).resolve().name if Path(name_or_path).exists() else name_or_path


def data_name(settings: Settings) -> str:
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


def _model_name(settings: Settings) -> str:
    base = base_name(str(settings.model.model_name_or_path)).rsplit("/", 1)[-1]
    return f"{base} fine-tuned on {data_name(settings)}"


def _architecture(model_folder: Path) -> str:
    path = model_folder / "config.json"
    if not path.is_file():
        return ""  # a model class of one's own
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return str((loaded.get("architectures") or ["model"])[0])


def _story(run_folder: Path, settings: Settings, data: Prepared, last: Evaluation) -> dict[str, Any]:
    """What happened, from the run's files."""
    config = json.loads((run_folder / "config.json").read_text(encoding="utf-8"))
    evaluations = list(read_lines(run_folder / "eval.jsonl"))
    steps = [line["step"] for line in evaluations if not is_comparison(line)]
    saved_step = steps[-1] if steps else 0
    return {
        "saved_step": saved_step,
        "readings": [
            (length, results(read, data.facts["problem_type"]))
            for length, read in readings(evaluations, saved_step, data.max_length, last)
        ],
        "hyperparameters": _hyperparameters(
            settings, config, last_step(run_folder / "metrics.jsonl"), _lora(run_folder, settings)
        ),
        "versions": {name: version for name, version in config["versions"].items() if version},
        "started": config["started"][:10],
        "model_class": config.get("model_class", "model"),
    }


def _notes(settings: Settings, data: Prepared) -> list[str]:
    """What was noticed while reading, with files by their names: folders say nothing elsewhere."""
    named, notes = settings.data, list(data.notes)
    for path in (named.train_file, named.validation_file, named.test_file, named.dataset_name):
        if path and Path(path).exists():
            notes = [note.replace(path, Path(path).resolve().name) for note in notes]
    return notes


def _lora(run_folder: Path, settings: Settings) -> str | None:
    """`r=8, alpha=16, dropout 0, on query, value; merged into the weights here`."""
    if not isinstance(settings.model, ModelSettings) or not settings.model.lora_r:
        return None
    own = json.loads((run_folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    layers = ", ".join(sorted(own["target_modules"]))
    numbers = f"r={own['r']}, alpha={own['lora_alpha']}, dropout {own['lora_dropout']:g}"
    return f"{numbers}, on {layers}; merged into the weights here"


def _hyperparameters(settings: Settings, config: dict[str, Any], steps: int, lora: str | None) -> dict[str, Any]:
    training, world, data = settings.training, config["world"], config["data"]
    known = flat(settings) | {
        "optimizer": config.get("optimizer", "AdamW"),
        "warm-up": f"{training.warmup_steps or 0} steps",
        "optimizer steps": f"{steps} of {data['total_steps']}, {data['steps_per_epoch']} an epoch",
        "label_smoothing_factor": training.label_smoothing_factor or None,
        "LoRA": lora,
        "max_length": data["max_length"],
        "mixed_precision": world["mixed_precision"],
        "processes": world["num_processes"],
        "device": world["device"],
    }
    if training.warmup_ratio is not None:
        known["warm-up"] = f"{training.warmup_ratio:g} of all steps"
    known["no_repeat_ngram_size"] = known.get("no_repeat_ngram_size") or None
    return {name: known[name] for name in _HYPERPARAMETERS if known.get(name) is not None}


def _limits(run_folder: Path, settings: Settings, problem_type: Task, last: Evaluation) -> dict[str, Any]:
    """What the section "Limits" is made of: only what follows from the run itself.

    `margin` is half the 95 % range of the mean ROUGE-L or of the accuracy (in percentage points), by the normal
    approximation; None where there are too few samples.
    """
    count, accuracy = last.numbers["num_samples"], last.numbers.get("accuracy")
    few, margin, empty = count < _FEW_SAMPLES, None, 0
    if problem_type == "title_generation":
        lines = list(read_lines(run_folder / "predictions.jsonl"))
        if len(lines) == count:
            empty = sum(not line["title"].strip() for line in lines)
        if len(lines) == count and not few:
            margin = 1.96 * statistics.stdev(line["scores"]["rougeL"] for line in lines) / math.sqrt(count)
    elif accuracy is not None and 0 < accuracy < 1 and not few:
        margin = 196 * math.sqrt(accuracy * (1 - accuracy) / count)
    metric = Best(settings.training.metric_for_best_model, problem_type).metric
    return {
        "chosen_by": metric_title(metric, problem_type) if last.split == "validation" else None,
        "few": few,
        "few_samples": _FEW_SAMPLES,
        "margin": margin,
        "accuracy_title": metric_title("accuracy", problem_type),
        "empty_titles": empty,
        "rare": [name for name, own in last.numbers.get("per_class", {}).items() if own["support"] < _FEW_SAMPLES],
        "licences": {
            "base model": demo.note_of(str(settings.model.model_name_or_path)),
            "data": demo.data_note_of(str(settings.data.dataset_name)),
        },
    }
