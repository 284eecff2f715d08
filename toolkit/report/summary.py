"""The lines that a run prints when it starts and ends, and the pages that it writes."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from toolkit import demo, launch
from toolkit.config import ModelSettings
from toolkit.data.prepare import Prepared
from toolkit.evaluation import Evaluation
from toolkit.launch.environment import attempt, max_restarts
from toolkit.models import lora
from toolkit.report.log import class_lines
from toolkit.report.record import architecture, last_evaluation
from toolkit.training.steps import Schedule
from toolkit.utils.extras import install_command, is_installed
from toolkit.utils.features import first, hooks
from toolkit.utils.units import size_text


class RunSummary:
    def __init__(
        self, accelerator: Accelerator, settings: Any, data: Prepared, schedule: Schedule, folder: Path
    ) -> None:
        self.accelerator, self.settings, self.data = accelerator, settings, data
        self.schedule, self.folder = schedule, folder

    def start_lines(self, model: Any) -> list[str]:
        """Data, model, world and schedule."""
        accelerator, settings, data, schedule = self.accelerator, self.settings, self.data, self.schedule
        per_step = f"{settings.training.global_batch_size} samples per step"
        if schedule.accumulation > 1:
            per_step += f" (at most {schedule.accumulation} micro-batches on each process)"
        count, kind = accelerator.num_processes, accelerator.distributed_type.value.lower()
        world = "one process" if kind == "no" else f"{count} process{'es' * (count > 1)} ({kind})"
        machines = launch.list_machines()
        lines = [
            f"attempt {attempt() + 1} of {max_restarts() + 1}" if attempt() else "",
            f"run folder: {self.folder}",
            f"{world}, {accelerator.device.type}, mixed precision {accelerator.mixed_precision}",
            f"machines: {', '.join(machines)}" if machines else "",
            ", ".join(f"{split}: {count} samples" for split, count in data.sizes.items())
            + f"; {data.targets.describe()}",
            f"texts: column {data.text_column}"
            + f"{f', paired with {data.text_pair}' if data.text_pair else ''}, at most {data.max_length} tokens",
            *data.notes,
            data.advice,
            f"{schedule.total_steps} optimizer steps, {schedule.steps_per_epoch} per epoch, {per_step}",
            demo.demo_entry(settings.model.model_name_or_path).note,
            demo.demo_entry(settings.data.dataset_name).note,
            _missing_packages(settings.training.report_to),
        ]
        if isinstance(settings.model, ModelSettings) and settings.model.lora_r:
            lines.append(lora.describe(model, settings.model))
        return [line for line in lines if line]

    def command(self, **settings: Any) -> str:
        """The command line of this run with these settings changed; "" in a notebook, or for a script without any."""
        from_demo = str(self.settings.data.dataset_name).startswith(demo.PREFIX)
        if "ipykernel" in sys.modules or not (from_demo or sys.argv[1:]):
            return ""
        words = shlex.split(launch.launch_info()["command"])
        for name, value in settings.items():
            if value is not None:
                place = words.index(f"--{name}") if f"--{name}" in words else len(words)
                length = 2 if len(words) > place + 1 and not words[place + 1].startswith("--") else 1
                words[place : place + length] = [f"--{name}", str(value)]
        return shlex.join([runnable_command(words[0]), *words[1:]])

    def command_to_continue(self) -> str:
        """The command that resumes the run after a stop signal."""
        training = self.settings.training
        command = self.command(
            output_dir=None if training.output_dir else self.folder,
            overwrite_output_dir="false" if training.overwrite_output_dir else None,
            resume=None if training.resume == "auto" else "auto",
        )
        return command or f"the same call, with output_dir={str(self.folder)!r}"

    def write_pages(self, best_step: int) -> None:
        """Writes report.html and, if a model was saved, its card, from the run's files; on the main process."""
        from toolkit.report.card import write_card  # imports jinja2 and matplotlib
        from toolkit.report.html import write_report_of_folder

        if best_step:
            write_card(self.folder / "model", self.folder, last_evaluation(self.folder, best_step))
        write_report_of_folder(self.folder)

    def end_lines(
        self, evaluation: Evaluation, comparison: Evaluation | None, seconds: float, feature_lines: Sequence[str]
    ) -> list[str]:
        """The results, and the files that hold them."""
        folder, model_class = shlex.quote(str(self.folder)), architecture(self.folder / "model")
        way = f"loads with {model_class}.from_pretrained" if model_class else "loads with the recipe's model only"
        compared = []
        if comparison is not None:
            length = self.settings.long.compare_max_length
            compared = [f"the same model reading the first {length} tokens only: {comparison} "
                        f"(reading {self.data.max_length}: {evaluation})"]  # fmt: skip
        return [
            "",
            f"done in {seconds:.0f} s; the saved model on {evaluation.split} "
            f"({evaluation.numbers['num_samples']} samples): {evaluation}",
            *class_lines(evaluation),
            *compared,
            f"  {folder}/model/            {way}, weights in {self.settings.training.save_dtype}",
            f"  {folder}/report.html       curves, results, worst mistakes: open it in a browser",
            f"  {folder}/predictions.jsonl every {evaluation.split} sample with its prediction",
            f"  {folder}/metrics.jsonl, eval.jsonl, config.json",
            *self._checkpoints(folder),
            *feature_lines,
            *self._next_command(),
        ]

    def _checkpoints(self, folder: str) -> list[str]:
        files = [file for file in (self.folder / "checkpoints").rglob("*") if file.is_file()]
        if not files:
            return []
        size = size_text(sum(file.stat().st_size for file in files))
        note = f"any number of processes can resume from them; `toolkit clean {folder}` removes them"
        return [f"  {folder}/checkpoints/      {size}, {note}"]

    def _next_command(self) -> list[str]:
        """A feature's command, or one for another run with this script, data and strategy."""
        command = first(hook(self.folder, self.settings) for hook in hooks("next_command", self.settings))
        if command is not None:
            return ["next:", f"  {command}"] if command else []
        training, again = self.settings.training, self.command()
        if not again:
            return []
        if str(self.settings.data.dataset_name).startswith(demo.PREFIX):  # the same launch on the user's data
            words, file = shlex.split(again), launch.launch_info()["config_file"]
            words = words[: words.index(sys.argv[0]) + 1] + (["--config_file", file] if file else [])
            again = f"{shlex.join(words)} --train_file YOUR_FILE.csv --model_name_or_path bert-base-chinese"
        else:
            folder = f"{training.output_dir.rstrip('/')}-2" if training.output_dir else None
            again = self.command(seed=training.seed + 1, output_dir=folder)
            again += "  # another seed: differences are chance"
        return ["next:", f"  {again}"]


def _missing_packages(report_to: str) -> str:
    """What the run will not write because a package is missing, and how to install it; "" where nothing is missing."""
    lacking = {} if is_installed("matplotlib") else {"report": "report.html will have no curves"}
    if report_to == "auto" and not is_installed("tensorboard"):
        lacking["tensorboard"] = "there will be no TensorBoard files"
    return f"{', '.join(lacking.values())}: {install_command(*lacking)}" if lacking else ""


def runnable_command(command: str) -> str:
    """The command, with its folder where this environment is not activated."""
    installed, on_path = Path(sys.executable).parent / command, shutil.which(command)
    if on_path and Path(on_path).resolve() == installed.resolve():
        return command
    return os.path.relpath(installed) if installed.exists() else command
