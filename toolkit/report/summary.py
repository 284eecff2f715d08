"""The lines that a run prints at its start and end, the commands to type next, and its pages."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from toolkit import demo, launch
from toolkit.config import ModelSettings
from toolkit.data.prepare import Data
from toolkit.errors import size_text
from toolkit.evaluation import Evaluation
from toolkit.launch.environment import attempt, max_restarts
from toolkit.models import lora
from toolkit.report.files import last_evaluation
from toolkit.report.model_class import architecture
from toolkit.training.schedule import Schedule
from toolkit.utils.extras import install_command, is_installed

_MAX_CLASSES = 20


class RunSummary:
    def __init__(
        self,
        accelerator: Accelerator,
        settings: Any,
        data: Data,
        schedule: Schedule,
        folder: Path,
    ) -> None:
        self.accelerator = accelerator
        self.settings = settings
        self.data = data
        self.schedule = schedule
        self.folder = folder
        self.is_demo = str(settings.data.dataset_name).startswith(demo.PREFIX)

    def start_lines(self, model: Any) -> list[str]:
        """World, data, model and schedule."""
        settings = self.settings
        lines = [
            *self._world_lines(),
            *self._data_lines(),
            self._schedule_line(),
            demo.demo_entry(settings.model.model_name_or_path).note,
            demo.demo_entry(settings.data.dataset_name).note,
            _missing_packages(settings.training.report_to),
        ]
        if isinstance(settings.model, ModelSettings) and settings.model.lora_r:
            lines.append(lora.describe(model, settings.model))
        return [line for line in lines if line]

    def _world_lines(self) -> list[str]:
        accelerator = self.accelerator
        lines = [f"run folder: {self.folder}"]
        if attempt():
            lines.append(f"attempt {attempt() + 1} of {max_restarts() + 1}")
        world = "one process"
        if accelerator.num_processes > 1:
            kind = accelerator.distributed_type.value.lower()
            world = f"{accelerator.num_processes} processes ({kind})"
        precision = accelerator.mixed_precision
        lines.append(f"{world}, {accelerator.device.type}, mixed precision {precision}")
        machines = launch.list_machines()
        if machines:
            lines.append(f"machines: {', '.join(machines)}")
        return lines

    def _data_lines(self) -> list[str]:
        data = self.data
        sizes = ", ".join(f"{split}: {count} samples" for split, count in data.sizes.items())
        columns = f"column {data.text_column}"
        if data.text_pair:
            columns += f", paired with {data.text_pair}"
        return [
            f"{sizes}; {data.targets.describe()}",
            f"texts: {columns}, at most {data.max_length} tokens",
            *data.notes,
            data.advice,
        ]

    def _schedule_line(self) -> str:
        schedule = self.schedule
        per_step = f"{self.settings.training.global_batch_size} samples per step"
        if schedule.accumulation > 1:
            per_step += f" (at most {schedule.accumulation} micro-batches on each process)"
        steps = f"{schedule.total_steps} optimizer steps, {schedule.steps_per_epoch} per epoch"
        return f"{steps}, {per_step}"

    def command_to_continue(self) -> str:
        """What resumes the run after a stop signal: a command, or a call in a script."""
        training = self.settings.training
        if "ipykernel" in sys.modules or not (self.is_demo or sys.argv[1:]):
            return f"the same call, with output_dir={str(self.folder)!r}"
        words = shlex.split(launch.launch_info()["command"])
        if not training.output_dir:
            words += ["--output_dir", str(self.folder)]
        if training.overwrite_output_dir:
            words.append("--overwrite_output_dir=false")
        if training.resume != "auto":
            words.append("--resume=auto")
        return shlex.join(words)

    def write_pages(self, best_step: int) -> None:
        """Writes report.html and, if a model was saved, its card, from the run's files; on the main
        process."""
        from toolkit.report.card import write_card  # imports jinja2 and matplotlib
        from toolkit.report.html import write_report_of_folder

        if best_step:
            write_card(self.folder / "model", self.folder, last_evaluation(self.folder, best_step))
        write_report_of_folder(self.folder)

    def end_lines(
        self,
        evaluation: Evaluation,
        comparison: Evaluation | None,
        seconds: float,
        feature_lines: Sequence[str],
    ) -> list[str]:
        """The results, and the files that hold them. `comparison`: on truncated texts."""
        folder = shlex.quote(str(self.folder))
        samples = f"{evaluation.split} ({evaluation.numbers['num_samples']} samples)"
        lines = [
            "",
            f"done in {seconds:.0f} s; the saved model on {samples}: {evaluation}",
            *class_lines(evaluation),
        ]
        if comparison is not None:
            length = self.settings.long.compare_max_length
            whole = f"(reading {self.data.max_length}: {evaluation})"
            first = f"the same model reading the first {length} tokens only: {comparison}"
            lines.append(f"{first} {whole}")
        return [
            *lines,
            f"  {folder}/model/            {self._way_to_load()}",
            f"  {folder}/report.html       curves, results, worst mistakes: open it in a browser",
            f"  {folder}/predictions.jsonl every {evaluation.split} sample with its prediction",
            f"  {folder}/metrics.jsonl, eval.jsonl, config.json",
            *self._checkpoints(folder),
            *feature_lines,
            *self._next_command(),
        ]

    def _way_to_load(self) -> str:
        way = "loads with the recipe's model only"
        model_class = architecture(self.folder / "model")
        if model_class:
            way = f"loads with {model_class}.from_pretrained"
        return f"{way}, weights in {self.settings.training.save_dtype}"

    def _checkpoints(self, folder: str) -> list[str]:
        files = [file for file in (self.folder / "checkpoints").rglob("*") if file.is_file()]
        if not files:
            return []
        size = size_text(sum(file.stat().st_size for file in files))
        note = "any number of processes can resume from them"
        return [f"  {folder}/checkpoints/      {size}, {note}"]

    def _next_command(self) -> list[str]:
        """That of the targets, or after a demo the same recipe on the user's data."""
        command = self.data.targets.next_command(self.settings, self.folder)
        if command is None and self.is_demo:
            words = ["python", sys.argv[0]]
            config_file = launch.launch_info()["config_file"]
            if config_file:
                words += ["--config_file", config_file]
            model = "--model_name_or_path bert-base-chinese"
            command = f"{shlex.join(words)} --train_file YOUR_FILE.csv {model}"
        return ["next:", f"  {command}"] if command else []


def class_lines(evaluation: Evaluation) -> list[str]:
    """F1 of each class, of many those with the lowest."""
    classes = evaluation.numbers.get("per_class", {})
    names = list(classes)
    if len(names) > _MAX_CLASSES:
        names = sorted(names, key=lambda name: classes[name]["f1"])[:_MAX_CLASSES]
    lines = []
    for name in names:
        lines.append(f"  F1 {classes[name]['f1']:.4f}  {name} (of {classes[name]['support']})")
    if len(names) < len(classes):
        lines.append(f"  and {len(classes) - len(names)} classes with higher F1")
    matrix = evaluation.numbers.get("confusion_matrix")
    if matrix:
        predicted = np.flatnonzero(np.sum(matrix, axis=0))
        if len(predicted) == 1:
            name = list(classes)[predicted[0]]
            remedy = "train longer, with a higher --learning_rate, or with --class_weights balanced"
            lines.append(f"  every row is predicted as {name}, nothing is learned yet: {remedy}")
    return lines


def _missing_packages(report_to: str) -> str:
    """What the run will not write because a package is missing; "" if nothing is missing."""
    missing = {}
    if not is_installed("matplotlib"):
        missing["report"] = "report.html will have no curves"
    if report_to == "auto" and not is_installed("tensorboard"):
        missing["tensorboard"] = "there will be no TensorBoard files"
    if not missing:
        return ""
    return f"{', '.join(missing.values())}: {install_command(*missing)}"
