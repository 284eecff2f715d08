"""The files of a run (docs/run-folder.md): written by the main process, and read for the model card, report.html and
comparisons."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open

from toolkit import demo, launch
from toolkit.config import flat
from toolkit.errors import UserError
from toolkit.evaluation import Best, Evaluation
from toolkit.evaluation.outputs import drop_redundant_f1
from toolkit.utils.files import explain_write_errors, nan_to_none, read_table, replace_file
from toolkit.utils.log import logger
from toolkit.utils.versions import versions

_Line = TypeVar("_Line")
# name in eval.jsonl -> title
METRICS = {
    "loss": "Loss", "accuracy": "Accuracy", "f1_macro": "F1 (macro)", "f1_micro": "F1 (micro)",
    "f1_weighted": "F1 (weighted)", "ece": "Expected calibration error", "brier": "Brier score",
    "mse": "Mean squared error", "mae": "Mean absolute error", "pearson": "Pearson correlation", "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2", "rougeL": "ROUGE-L",
}  # fmt: skip


class RunFiles:
    """Writes config.json, metrics.jsonl, eval.jsonl and predictions.jsonl on the main process."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.accelerator, self.path, self.writes = accelerator, path, accelerator.is_main_process

    def write_config(self, settings: Any, data: dict[str, Any], extra: dict[str, Any]) -> None:
        if not self.writes:
            return
        accelerator = self.accelerator
        plugin, device = accelerator.state.deepspeed_plugin, accelerator.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        config = {
            "settings": flat(settings),
            "data": data,
            "world": {
                "num_processes": accelerator.num_processes,
                "distributed_type": accelerator.distributed_type.value,
                "deepspeed": plugin.deepspeed_config if plugin else None,
                "mixed_precision": accelerator.mixed_precision,
                "device": gpu or f"{device.type} ({platform.machine()})",
                "host": platform.node(),
                "pid": os.getpid(),
            },
            "launch": launch.launch_info(),
            "versions": versions(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **extra,
        }
        write_atomically(self.path / "config.json", [dumps(config, indent=2), "\n"])

    def truncate_to_checkpoint(self, manifest: Mapping[str, Any] | None) -> None:
        """Truncates metrics.jsonl and eval.jsonl to the step of this run's checkpoint, after which the steps are done
        again, and removes predictions.jsonl if it is of an evaluation after the checkpoint. Warns about lines that
        have been lost since. Removes the files if there is no checkpoint."""
        if not self.writes:
            return
        step, counts = (manifest["step"], manifest.get("lines", {})) if manifest else (0, {})
        metrics = [
            line
            for line in latest_per_step(read_lines(self.path / "metrics.jsonl"))
            if line["step"] <= step
        ]
        earlier = [line for line in metrics if line["step"] < step]
        if manifest and len(metrics) == len(
            earlier
        ):  # the step's line is written after its checkpoint
            metrics.append(manifest["metrics"])
        evaluation_file, num_evaluations = self.path / "eval.jsonl", counts.get("eval.jsonl", 0)
        evaluations = list(read_lines(evaluation_file, num_evaluations))
        if (
            evaluation_file.is_file()
            and evaluation_file.read_bytes().count(b"\n") > num_evaluations
        ):
            (self.path / "predictions.jsonl").unlink(missing_ok=True)
        for name, lines, count in (("metrics.jsonl", metrics, len(earlier)),
                                   ("eval.jsonl", evaluations, len(evaluations))):  # fmt: skip
            if count < counts.get(name, 0):
                logger.warning(
                    f"{self.path / name} has {count} of the {counts[name]} lines that it had at step {step}"
                )
            if lines:
                write_atomically(self.path / name, (dumps(line) + "\n" for line in lines))
            else:
                (self.path / name).unlink(missing_ok=True)

    def mark_stopped(self, **facts: Any) -> None:
        """Adds to config.json that a stop signal ended the run; the report and the card show it at their top."""
        if self.writes:
            path = self.path / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            write_atomically(path, [dumps({**config, "stopped": facts}, indent=2), "\n"])

    def append_evaluation(self, evaluation: Evaluation, step: int, **extra: Any) -> None:
        self.append(
            "eval.jsonl", {"step": step, "split": evaluation.split, **extra, **evaluation.numbers}
        )
        if (
            self.writes and not extra
        ):  # or, after a kill, those of an earlier evaluation would count as this one's
            (self.path / "predictions.jsonl").unlink(missing_ok=True)

    def write_predictions(self, evaluation: Evaluation) -> None:
        if evaluation.predictions is not None:
            write_atomically(
                self.path / "predictions.jsonl",
                (dumps(line) + "\n" for line in evaluation.predictions()),
            )

    def append(self, name: str, line: dict[str, Any]) -> None:
        if not self.writes:
            return
        path = self.path / name
        size = path.stat().st_size if path.exists() else 0
        with explain_write_errors(path):
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(dumps(line) + "\n")
            except OSError:
                os.truncate(path, size)  # no half line if the disk is full
                raise


def write_atomically(path: Path, parts: Iterable[str]) -> None:
    """Writes a file under another name and renames it. Raises UserError if the disk is full."""
    with (
        explain_write_errors(path),
        replace_file(path, flush=False) as draft,
        draft.open("x", encoding="utf-8") as file,
    ):
        file.writelines(parts)


def dumps(content: Any, indent: int | None = None) -> str:
    """JSON, with null for numbers that are not finite."""
    return json.dumps(nan_to_none(content), ensure_ascii=False, indent=indent, default=str)


def read_lines(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects of the first `most` lines of a .jsonl file, or nothing if it does not exist. Skips a broken
    line (after a power cut) with a warning, and an unfinished last line (of a killed run) silently."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(itertools.islice(file, most), 1):
            try:
                yield dict(json.loads(line.strip("\0 \n")))
            except (ValueError, TypeError, RecursionError):
                if line.endswith("\n") or "\0" in line:
                    logger.warning(f"{path}, line {number} is broken and is skipped")


def latest_per_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each step, in order: a resumed run repeats the steps after its checkpoint."""
    last = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    return [last[step] for step in sorted(last)]


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
        """`last`: by default the last one in eval.jsonl. Raises OSError if config.json is missing."""
        config = (folder / "config.json").read_text(encoding="utf-8")
        if Path.home().name:
            config = re.sub(rf'(?<![\w.-]){re.escape(str(Path.home()))}(?=["/ ])', "~", config)
        lines = [
            {"step": line["step"], "split": line["split"],
             **{name: value for name, value in line.items() if isinstance(value, int | float | None)}}
            for line in read_lines(folder / "eval.jsonl")
        ]  # fmt: skip
        evaluations, comparisons = (
            [line for line in lines if ("max_length" in line) == cut] for cut in (False, True)
        )
        steps = latest_per_step(read_lines(folder / "metrics.jsonl"))
        return cls(
            json.loads(config), steps, evaluations, comparisons, last or last_evaluation(folder)
        )

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
        return list(
            dict.fromkeys(name for line in self.evaluations for name in drop_redundant_f1(line))
        )

    @property
    def training_evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of the split that is evaluated during training."""
        return [line for line in self.evaluations if line["split"] == self.evaluations[0]["split"]]

    @property
    def best(self) -> Best:
        """The run's metric for the best model, before any evaluation."""
        metric, greater = (
            self.data.get("metric_for_best_model"),
            self.settings.get("greater_is_better"),
        )
        return Best(
            metric or self.settings.get("metric_for_best_model"),
            self.problem_type,
            greater_is_better=greater,
        )

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
                probabilities = np.array(line["probabilities"], float).clip(
                    1e-12
                )  # null becomes a NaN
                scores = np.log(probabilities) - np.log(thresholds / (1 - thresholds))
                line |= {"prediction": names[int(scores.argmax())], "abstained": True}
            yield line

    def of_last(self, lines: list[_Line]) -> list[_Line]:
        """What was read from predictions.jsonl; [] if it is not of the last evaluation (the run was killed before it
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
        names = sorted(
            (name for name, value in numbers.items() if isinstance(value, float | None)),
            key="loss".__eq__,
        )
        return {self.metric_title(name): numbers[name] for name in names}

    @property
    def results_by_length(self) -> list[tuple[int, dict[str, float | None]]]:
        """(max_length, results) of the saved model, its training length first; empty without `--compare_max_length`."""
        others = {
            line["max_length"]: self.results(line)
            for line in self.comparisons
            if line["step"] == self.last_step
        }
        return (
            [(self.data["max_length"], self.results()), *sorted(others.items(), reverse=True)]
            if others
            else []
        )

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
    """config.json of a run. Raises UserError if `folder` holds none."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = read_table(folder / "config.json")
    if "data" not in config:
        raise UserError(f"{folder} is not a run folder: its config.json is that of a model")
    return config


def architecture(model_folder: Path) -> str:
    """The class in a saved model's config.json; "" if it cannot load the weights: a model that is not of
    transformers, or whose head or layers the recipe replaced."""
    path = model_folder / "config.json"
    if not path.is_file():
        return ""
    config = json.loads(path.read_text(encoding="utf-8"))
    shapes: dict[str, list[int]] = {}
    for file in model_folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    if shapes and not _fits(shapes, config):
        return ""
    return str((config.get("architectures") or ["model"])[0])


_BERTS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "electra",
    "ernie",
    "nezha",
    "distilbert",
    "big_bird",
)
_HEADS = ("classifier.weight", "classifier.out_proj.weight", "score.weight")


def _fits(shapes: Mapping[str, list[int]], config: Mapping[str, Any]) -> bool:
    """Whether a classifier's weights have the labels of its config, and a BERT's its words and layers."""
    heads = [shapes[name] for name in _HEADS if name in shapes]
    labels = len(config.get("id2label") or range(config.get("num_labels", 2)))
    is_classifier = str(config.get("architectures")).endswith(
        ("SequenceClassification']", "TokenClassification']")
    )
    if is_classifier and any(head[0] != labels for head in heads):
        return False
    if config.get("model_type") not in _BERTS:
        return True
    layers = {int(match[1]) for name in shapes if (match := re.search(r"\blayer\.(\d+)\.", name))}
    count = config.get("num_hidden_layers", config.get("n_layers"))
    has_words = any(name.endswith("embeddings.word_embeddings.weight") for name in shapes)
    return has_words and len(layers) == count and bool(heads or not is_classifier)


def is_local(name: str) -> bool:
    """Whether the name of a model or data set is a local path, not a name on the hub."""
    return name.startswith(("/", "./", "../", "~")) or Path(name).exists()


def without_folders(name: str) -> str:
    """The last part of a local path: its folders mean nothing elsewhere, and may contain a user's name."""
    return Path(name).resolve().name if is_local(name) else name
