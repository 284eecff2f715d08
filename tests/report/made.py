"""Run folders in the format of toolkit/report/files.py, with invented numbers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.inputs import write_jsonl
from tests.runs import lines_of
from toolkit.data.labels import Labels
from toolkit.evaluation import Evaluation

TITLES = {"loss": 2.5, "rouge1": 0.41, "rouge2": 0.2, "rougeL": 0.35, "rouge_segmenter": "jieba"}
STATE = {"accuracy": 0.75, "ece": 0.2}
DECISIONS = {"temperature": 1.5, "thresholds": {}, "abstain_below": 0.6, "answered": 10, "accuracy_of_answered": 0.9,
             "before": STATE, "after": STATE | {"ece": 0.1}}  # fmt: skip
SETTINGS = {"model_name_or_path": "demo:minilm", "dataset_name": None, "train_file": "数据/train<1>.csv",
            "global_batch_size": 32, "max_grad_norm": 1.0, "learning_rate": 5e-5}  # fmt: skip


def make_run(
    folder: Path, labels: Labels | None, predictions: Sequence[dict[str, Any]], numbers: dict[str, Any],
    settings: dict[str, Any] = SETTINGS, **data: Any,
) -> Evaluation:  # fmt: skip
    """A run of 40 steps with 4 evaluations, the last the best; without labels a run on titles."""
    folder.mkdir()
    metric, kind = "rougeL", {"problem_type": "title_generation", "pipeline_tag": "summarization"}
    learned: dict[str, Any] = kind | {"labels": [], "title_column": "标题", "max_target_length": 24}
    if labels:
        metric = labels.usual_metric
        learned = {"labels": list(labels.names), "problem_type": labels.problem_type}
    count = numbers.get("num_samples", len(predictions))
    config = {
        "settings": settings,
        "data": {"samples": {"train": 7677, "validation": count}, **learned, "max_length": 128, "notes": [],
                 "metric_for_best_model": metric, "digest": "none", "total_steps": 40, "steps_per_epoch": 240, **data},
        "world": {"num_processes": 2, "distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
                  "deepspeed": {"zero_optimization": {"stage": 2}}, "device": "A100", "host": "node-0"},
        "strategy": "zero2",
        "launch": {"config_file": "accelerate_configs/zero2.yaml", "command": "recipes/cls.py --seed 1"},
        "versions": {"toolkit": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "peft": None},
        "started": "2026-11-20T07:13:30+00:00",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    per_step = [
        {"step": step, "epoch": step / 240, "loss": 1 / step, "learning_rate": 1e-5, "grad_norm": 0.5, "samples": 32,
         "tokens": 755, "samples_per_second": 100.0, "tokens_per_second": 2000.0, "peak_memory_bytes": 2**30}
        for step in range(1, 41)
    ]  # fmt: skip
    whole = {"num_samples": count, **numbers}
    per_evaluation = [{"step": step, "split": "validation", **whole} for step in (10, 20, 30, 40)]
    for line in per_evaluation[:-1]:
        line |= {name: 0.1 for name in ("accuracy", "f1_macro", "rougeL") if name in numbers}
        line["loss"] = 2 * numbers["loss"]
    write_jsonl(folder / "metrics.jsonl", per_step)
    write_jsonl(folder / "eval.jsonl", per_evaluation)
    write_jsonl(folder / "predictions.jsonl", predictions)
    return Evaluation("validation", whole, None)


def classifier(sharp_model: Path, folder: Path, labels: Labels) -> Path:
    """The sharp BERT with a random head for these labels, saved as a run saves it."""
    torch.manual_seed(1)
    kind: Any = {"num_labels": labels.size, "problem_type": labels.problem_type}
    model = AutoModelForSequenceClassification.from_pretrained(sharp_model, **kind)
    model.config.id2label = dict(enumerate(labels.names))
    model.config.label2id = {name: number for number, name in enumerate(labels.names)}
    model.classifier.weight.data *= 100
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(sharp_model).save_pretrained(folder)
    return folder


def save_columns(model: Path, **columns: Any) -> None:
    """The columns that a model was trained on, as a run saves them with its tokenizer."""
    model.mkdir(exist_ok=True)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**config, "training_columns": columns}))


def add_comparison(folder: Path, **more: Any) -> None:
    line = {"step": 40, "split": "validation_first_16", "max_length": 16, "num_samples": 60, "loss": 0.25,
            "accuracy": 0.625, "f1_macro": 0.99, "per_class": {}} | more  # fmt: skip
    write_jsonl(folder / "eval.jsonl", [*lines_of(folder / "eval.jsonl"), line])
