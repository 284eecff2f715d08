"""The files of a run, read for the model card, report.html and comparisons."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from toolkit import demo
from toolkit.checkpoint.convert.model_files import check_config
from toolkit.checkpoint.safetensors_header import read_header
from toolkit.errors import UserError
from toolkit.evaluation import Best, Evaluation
from toolkit.evaluation.outputs import drop_redundant_f1
from toolkit.report.files import latest_per_step, read_lines
from toolkit.utils.files import read_table, refuse_link_out

_Line = TypeVar("_Line")
# name in eval.jsonl -> title
METRICS = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "f1_macro": "F1 (macro)",
    "f1_micro": "F1 (micro)",
    "f1_weighted": "F1 (weighted)",
    "ece": "Expected calibration error",
    "brier": "Brier score",
    "mse": "Mean squared error",
    "mae": "Mean absolute error",
    "pearson": "Pearson correlation",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
}


@dataclass(frozen=True)
class Record:
    """The content of a run's files."""

    config: dict[str, Any]
    """config.json, with `~` for the user's home folder."""
    steps: list[dict[str, Any]]
    """The lines of metrics.jsonl, each step once."""
    evaluations: list[dict[str, Any]]
    """The lines of eval.jsonl without lists and dictionaries."""
    comparisons: list[dict[str, Any]]
    """Evaluations on truncated texts (`--compare_max_length`), which are not results of the run."""
    last: Evaluation
    """The evaluation of the rows in predictions.jsonl."""

    @classmethod
    def load(cls, folder: Path, last: Evaluation | None = None) -> Record:
        """`last`: by default the last one in eval.jsonl. Raises OSError where config.json is missing."""
        config = (folder / "config.json").read_text(encoding="utf-8")
        if Path.home().name:
            config = re.sub(rf'(?<![\w.-]){re.escape(str(Path.home()))}(?=["/ ])', "~", config)
        lines = [
            {"step": line["step"], "split": line["split"],
             **{name: value for name, value in line.items() if isinstance(value, int | float | None)}}
            for line in read_lines(folder / "eval.jsonl")
        ]  # fmt: skip
        evaluations, comparisons = ([line for line in lines if ("max_length" in line) == cut] for cut in (False, True))
        steps = latest_per_step(read_lines(folder / "metrics.jsonl"))
        return cls(json.loads(config), steps, evaluations, comparisons, last or last_evaluation(folder))

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["settings"]

    @property
    def data(self) -> dict[str, Any]:
        return self.config["data"]

    @property
    def problem_type(self) -> str:
        return self.data["problem_type"]

    @property
    def last_step(self) -> int | None:
        return self.evaluations[-1]["step"] if self.evaluations else None

    @property
    def metric_names(self) -> list[str]:
        return list(dict.fromkeys(name for line in self.evaluations for name in drop_redundant_f1(line)))

    @property
    def training_evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of the split that is evaluated during training."""
        return [line for line in self.evaluations if line["split"] == self.evaluations[0]["split"]]

    @property
    def best(self) -> Best:
        """The run's metric for the best model, before any evaluation."""
        metric, greater = self.data.get("metric_for_best_model"), self.settings.get("greater_is_better")
        return Best(metric or self.settings.get("metric_for_best_model"), self.problem_type, greater_is_better=greater)

    @cached_property
    def saved_step(self) -> int | None:
        """The step of the best model; in a killed run it may not be the step of the last evaluation."""
        best = self.best
        for line in self.training_evaluations:
            best.update(Evaluation(line["split"], line, None), line["step"])
        return best.step or None

    @property
    def strategy(self) -> str:
        """`one process`, `2 x ZeRO-3`."""
        world = self.config["world"]
        if world["distributed_type"] == "NO":
            return "one process"
        kind = {"FSDP": "FSDP2"}.get(world["distributed_type"], "DDP")
        if world["deepspeed"]:
            kind = f"ZeRO-{world['deepspeed'].get('zero_optimization', {}).get('stage', 0)}"
        return f"{world['num_processes']} x {kind}"

    @property
    def cost(self) -> dict[str, Any]:
        """Seconds in training steps (without evaluations), the median speed, the peak memory of a process."""
        timed = [step for step in self.steps if step.get("samples_per_second")]
        peaks = [step["peak_memory_bytes"] for step in self.steps if step.get("peak_memory_bytes")]

        def median(name: str) -> float | None:
            values = [step[name] for step in timed if name in step]
            return statistics.median(values) if values else None

        return {
            "steps": self.steps[-1]["step"] if self.steps else 0,
            "seconds": sum(step["samples"] / step["samples_per_second"] for step in timed) or None,
            "samples_per_second": median("samples_per_second"),
            "tokens_per_second": median("tokens_per_second"),
            "peak_memory_bytes": max(peaks, default=None),
        }

    def predictions(self, folder: Path) -> Iterator[dict[str, Any]]:
        """The lines of predictions.jsonl; one without an answer (`--abstain_below`) gets the most probable class, which
        the metrics count, and `abstained`."""
        names = self.data.get("labels") or ()
        by_name = self.last.numbers.get("decisions", {}).get("thresholds", {})
        thresholds = np.array([by_name.get(name, 0.5) for name in names])
        for line in read_lines(folder / "predictions.jsonl"):
            if line.get("prediction", "") is None and "probabilities" in line:
                probabilities = np.array(line["probabilities"], float).clip(1e-12)  # null becomes a NaN
                scores = np.log(probabilities) - np.log(thresholds / (1 - thresholds))
                line |= {"prediction": names[int(scores.argmax())], "abstained": True}
            yield line

    def of_last(self, lines: list[_Line]) -> list[_Line]:
        """What was read from predictions.jsonl; [] where it is not of the last evaluation (the run was killed before it
        wrote it)."""
        return lines if len(lines) == self.last.numbers.get("num_samples") else []

    def metric_title(self, name: str) -> str:
        """`f1_macro` -> `F1 (macro)`."""
        if name == "accuracy" and self.problem_type == "multi_label_classification":
            return "Accuracy (all labels right)"
        if name == "loss" and self.problem_type == "title_generation":
            return "Loss (of a title's token)"
        if name == "loss" and self.settings.get("class_weights"):
            return "Loss (weighted by class)"
        return METRICS.get(name) or name.replace("_", " ")

    def results(self, numbers: dict[str, Any] | None = None) -> dict[str, float | None]:
        """The metrics of an evaluation (default: the last) by title, the loss at the end."""
        numbers = drop_redundant_f1(self.last.numbers if numbers is None else numbers)
        names = sorted((name for name, value in numbers.items() if isinstance(value, float | None)), key="loss".__eq__)
        return {self.metric_title(name): numbers[name] for name in names}

    @property
    def results_by_length(self) -> list[tuple[int, dict[str, float | None]]]:
        """(max_length, results) of the saved model, its training length first; empty without `--compare_max_length`."""
        others = {line["max_length"]: self.results(line) for line in self.comparisons if line["step"] == self.last_step}
        return [(self.data["max_length"], self.results()), *sorted(others.items(), reverse=True)] if others else []

    @property
    def base_model(self) -> str:
        """The base model's name without local folders; a demo model's name on the hub."""
        name = str(self.settings["model_name_or_path"])
        return demo.demo_entry(name).origin or without_folders(name)

    @property
    def data_name(self) -> str:
        """The name of the data set, or of the training file."""
        if not self.settings.get("dataset_name"):
            return Path(str(self.settings.get("train_file") or self.settings.get("test_file"))).name
        name = without_folders(self.settings["dataset_name"].removeprefix(demo.PREFIX))
        configuration = self.settings.get("dataset_config_name")
        return f"{name} ({configuration})" if configuration else name


def last_evaluation(folder: Path, step: int | None = None) -> Evaluation:
    """The last evaluation in eval.jsonl (at `step`), those on truncated texts left out; no numbers if there is none."""
    lines = (line for line in read_lines(folder / "eval.jsonl") if "max_length" not in line)
    *_, last = [{}, *(line for line in lines if step in (None, line["step"]))]
    last.pop("step", None)
    return Evaluation(last.pop("split", "validation"), last, None)


def run_config(folder: Path) -> dict[str, Any]:
    """config.json of a run. Raises UserError where `folder` holds none."""
    if not (folder / "config.json").is_file():
        runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        hint = f": did you mean {runs[0]}?" if runs else ""
        raise UserError(f"{folder} is not a run folder: it has no config.json{hint}")
    for name in ("config.json", "metrics.jsonl", "eval.jsonl", "predictions.jsonl"):
        refuse_link_out(folder / name, folder)
    config = read_table(folder / "config.json", {})
    if "data" not in config:
        hint = f": did you mean {folder.parent}?" if (folder.parent / "metrics.jsonl").is_file() else ""
        raise UserError(f"{folder} is not a run folder: its config.json is that of a model{hint}")
    return config


def architecture(model_folder: Path) -> str:
    """The class in a saved model's config.json; "" where it cannot load the weights: a model that is not of
    transformers, or whose head the recipe replaced."""
    path = model_folder / "config.json"
    if not path.is_file():
        return ""
    config = json.loads(path.read_text(encoding="utf-8"))
    shapes = {name: tensor.shape for file in model_folder.glob("*.safetensors")
              for name, tensor in read_header(file)[0].items()}  # fmt: skip
    try:
        check_config(shapes, config if shapes else {}, path, str(model_folder))
    except UserError:
        return ""
    return str((config.get("architectures") or ["model"])[0])


def is_local(name: str) -> bool:
    """Whether the name of a model or data set is a local path, not a name on the hub."""
    return name.startswith(("/", "./", "../", "~")) or Path(name).exists()


def without_folders(name: str) -> str:
    """The last part of a local path: its folders mean nothing elsewhere, and may contain a user's name."""
    return Path(name).resolve().name if is_local(name) else name
