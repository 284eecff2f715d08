"""What the files of a run say, for the model card, report.html and comparisons."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from toolkit import demo
from toolkit.evaluation import Best, Evaluation
from toolkit.evaluation.outputs import drop_redundant_f1
from toolkit.report.files import last_evaluation, read_lines

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
    """The lines of metrics.jsonl."""
    evaluations: list[dict[str, Any]]
    """The lines of eval.jsonl without lists and dictionaries."""
    comparisons: list[dict[str, Any]]
    """Evaluations on truncated texts (`--compare_max_length`), which are not results of the run."""
    last: Evaluation
    """The evaluation of the rows in predictions.jsonl."""

    @classmethod
    def load(cls, folder: Path, last: Evaluation | None = None) -> Record:
        """`last`: by default the last one in eval.jsonl. Raises OSError if config.json is
        missing."""
        config = (folder / "config.json").read_text(encoding="utf-8")
        if Path.home().name:
            config = config.replace(f"{Path.home()}/", "~/")
        steps = list(read_lines(folder / "metrics.jsonl"))
        evaluations = []
        comparisons = []
        for line in read_lines(folder / "eval.jsonl"):
            single = {name: value for name, value in line.items() if _is_single(name, value)}
            if "max_length" in line:
                comparisons.append(single)
            else:
                evaluations.append(single)
        if last is None:
            last = last_evaluation(folder)
        return cls(json.loads(config), steps, evaluations, comparisons, last)

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
        if not self.evaluations:
            return None
        return self.evaluations[-1]["step"]

    @property
    def metric_names(self) -> list[str]:
        names = [name for line in self.evaluations for name in drop_redundant_f1(line)]
        return list(dict.fromkeys(names))

    @property
    def training_evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of the split that is evaluated during training."""
        return [line for line in self.evaluations if line["split"] == self.evaluations[0]["split"]]

    @property
    def best(self) -> Best:
        """The run's metric for the best model, before any evaluation."""
        chosen = self.settings.get("metric_for_best_model")
        metric = self.data.get("metric_for_best_model") or chosen
        greater = self.settings.get("greater_is_better")
        return Best(metric, self.problem_type, greater_is_better=greater)

    @cached_property
    def saved_step(self) -> int | None:
        """The step of the best model; in a killed run it may not be the step of the last
        evaluation."""
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
        kind = "DDP"
        if world["distributed_type"] == "FSDP":
            kind = "FSDP2"
        if world["deepspeed"]:
            stage = world["deepspeed"].get("zero_optimization", {}).get("stage", 0)
            kind = f"ZeRO-{stage}"
        return f"{world['num_processes']} x {kind}"

    @property
    def cost(self) -> dict[str, Any]:
        """Steps done, seconds in them (without evaluations), median speeds, and the peak memory of
        a process; None where unknown."""
        timed = [step for step in self.steps if step.get("samples_per_second")]
        seconds = sum(step["samples"] / step["samples_per_second"] for step in timed)
        cost = {"steps": len(self.steps), "seconds": seconds}
        for name in ("samples_per_second", "tokens_per_second"):
            values = [step[name] for step in timed if name in step]
            cost[name] = statistics.median(values) if values else None
        peaks = [step.get("peak_memory_bytes") or 0 for step in self.steps]
        cost["peak_memory_bytes"] = max(peaks, default=None)
        return cost

    def predictions(self, folder: Path) -> Iterator[dict[str, Any]]:
        """The lines of predictions.jsonl; one without an answer (`--abstain_below`) gets the most
        probable class, which the metrics count, and `abstained`."""
        names = self.data.get("labels") or ()
        thresholds = self.last.numbers.get("decisions", {}).get("thresholds", {})
        for line in read_lines(folder / "predictions.jsonl"):
            if line.get("prediction", "") is None and "probabilities" in line:
                odds = {}
                for name, probability in zip(names, line["probabilities"], strict=True):
                    threshold = thresholds.get(name, 0.5)
                    odds[name] = (probability or 0) * (1 - threshold) / threshold
                line["prediction"] = max(odds, key=odds.__getitem__)
                line["abstained"] = True
            yield line

    def of_last(self, lines: list[_Line]) -> list[_Line]:
        """What was read from predictions.jsonl; [] if it is not of the last evaluation (the run was
        killed before it wrote it)."""
        if len(lines) != self.last.numbers.get("num_samples"):
            return []
        return lines

    def metric_title(self, name: str) -> str:
        """`f1_macro` -> `F1 (macro)`."""
        if name == "accuracy" and self.problem_type == "multi_label_classification":
            return "Accuracy (all labels right)"
        if name == "loss" and self.settings.get("class_weights"):
            return "Loss (weighted by class)"
        return METRICS.get(name) or name.replace("_", " ")

    def results(self, numbers: dict[str, Any] | None = None) -> dict[str, float | None]:
        """The metrics of an evaluation (default: the last) by title, the loss at the end."""
        if numbers is None:
            numbers = self.last.numbers
        values = drop_redundant_f1(numbers)
        names = [name for name, value in values.items() if isinstance(value, float | None)]
        names.sort(key=lambda name: name == "loss")
        return {self.metric_title(name): values[name] for name in names}

    @property
    def results_by_length(self) -> list[tuple[int, dict[str, float | None]]]:
        """(max_length, results) of the saved model, its training length first; empty without
        `--compare_max_length`."""
        lines = [line for line in self.comparisons if line["step"] == self.last_step]
        if not lines:
            return []
        others = {line["max_length"]: self.results(line) for line in lines}
        return [(self.data["max_length"], self.results()), *sorted(others.items(), reverse=True)]

    @property
    def base_model(self) -> str:
        """The base model's name without local folders; a demo model's name on the hub."""
        name = str(self.settings["model_name_or_path"])
        return demo.demo_entry(name).origin or without_folders(name)

    @property
    def data_name(self) -> str:
        """The name of the data set, or of the training file."""
        settings = self.settings
        if not settings.get("dataset_name"):
            return Path(str(settings.get("train_file") or settings.get("test_file"))).name
        name = without_folders(settings["dataset_name"].removeprefix(demo.PREFIX))
        configuration = settings.get("dataset_config_name")
        if configuration:
            name += f" ({configuration})"
        return name


def _is_single(name: str, value: Any) -> bool:
    return name == "split" or isinstance(value, int | float | None)


def is_local(name: str) -> bool:
    """Whether the name of a model or data set is a local path, not a name on the hub."""
    return name.startswith(("/", "./", "../", "~")) or Path(name).exists()


def without_folders(name: str) -> str:
    """The last part of a local path: its folders mean nothing elsewhere, and may contain a user's
    name."""
    if is_local(name):
        return Path(name).resolve().name
    return name
