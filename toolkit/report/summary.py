"""What a run prints when it starts and ends, and the pages that it writes."""

from __future__ import annotations

import json
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
from toolkit.launch import restarts
from toolkit.models import lora
from toolkit.report.files import latest_per_step, read_lines
from toolkit.report.log import class_lines
from toolkit.report.record import last_evaluation
from toolkit.training import mfu
from toolkit.training.steps import Schedule
from toolkit.utils.extras import install_command, is_installed
from toolkit.utils.features import features, first
from toolkit.utils.units import size_text


class RunSummary:
    """Of the run in a folder."""

    def __init__(
        self, accelerator: Accelerator, settings: Any, data: Prepared, schedule: Schedule, folder: Path
    ) -> None:
        self.accelerator, self.settings, self.data = accelerator, settings, data
        self.schedule, self.folder = schedule, folder

    def introduction(self, model: Any) -> list[str]:
        """How the run trains, and on what."""
        accelerator, settings, data, schedule = self.accelerator, self.settings, self.data, self.schedule
        per_step = f"{settings.training.global_batch_size} samples per step"
        if schedule.accumulation > 1:
            uneven = settings.training.max_tokens_per_batch is not None or data.train.buckets is not None
            at_most = "at most " if uneven else ""
            per_step += f" ({at_most}{schedule.accumulation} micro-batches on each process)"
        machines = launch.list_machines()
        lines = [
            f"attempt {restarts.attempt() + 1} of {restarts.max_restarts() + 1}" if restarts.attempt() else "",
            f"run folder: {self.folder}",
            f"{_world(accelerator)}, {accelerator.device.type}, mixed precision {accelerator.mixed_precision}",
            f"machines: {', '.join(machines)}" if machines else "",
            ", ".join(f"{split}: {count} samples" for split, count in data.sizes.items())
            + f"; {data.targets.describe()}",
            f"texts: column {data.text_column}, at most {data.max_length} tokens",
            *data.notes,
            data.advice,
            f"{schedule.total_steps} optimizer steps, {schedule.steps_per_epoch} per epoch, {per_step}",
            demo.demo_entry(settings.model.model_name_or_path).note,
            demo.demo_entry(settings.data.dataset_name).note,
            _left_out(settings.training.report_to),
        ]
        if isinstance(settings.model, ModelSettings) and settings.model.lora_r:
            lines.append(lora.describe(model, settings.model))
        return [line for line in lines if line]

    def command(self, **settings: Any) -> str:
        """The command line of this run with these settings in it; "" in a notebook, or a script with its own."""
        from_demo = str(self.settings.data.dataset_name).startswith(demo.PREFIX)
        if "ipykernel" in sys.modules or not (from_demo or sys.argv[1:]):
            return ""
        words = shlex.split(launch.launch_info()["command"])
        for name, value in settings.items():
            if value is not None:
                place = words.index(f"--{name}") if f"--{name}" in words else len(words)
                length = 2 if len(words) > place + 1 and not words[place + 1].startswith("--") else 1
                words[place : place + length] = [f"--{name}", str(value)]
        return shlex.join([command_here(words[0]), *words[1:]])

    def command_to_continue(self) -> str:
        """The command that resumes a run that a stop signal ended."""
        training = self.settings.training
        command = self.command(
            output_dir=None if training.output_dir else self.folder,
            overwrite_output_dir="false" if training.overwrite_output_dir else None,
            resume=None if training.resume == "auto" else "auto",
        )
        return command or f"the same call, with output_dir={str(self.folder)!r}"

    def write_pages(self, best_step: int) -> None:
        """The model card, where there is a model, and report.html, from the run's files; on one process."""
        from toolkit.report.card import write_card  # jinja2, and matplotlib where it is
        from toolkit.report.html import write_report_of_folder

        if best_step:
            write_card(self.folder / "model", self.folder, last_evaluation(self.folder, best_step))
        write_report_of_folder(self.folder)

    def lines(
        self, evaluation: Evaluation, comparison: Evaluation | None, seconds: float, more: Sequence[str]
    ) -> list[str]:
        """The results, and where they are; `more`: lines of features."""
        folder = shlex.quote(str(self.folder))
        compared = []
        if comparison is not None:
            length = self.settings.long.compare_max_length
            compared = [f"the same model reading the first {length} tokens only: {comparison}"]
            compared[0] += f" (reading {self.data.max_length}: {evaluation})"
        utilization = mfu.describe(latest_per_step(read_lines(self.folder / "metrics.jsonl")))
        return [
            "",
            f"done in {seconds:.0f} s; the saved model on {evaluation.split} "
            f"({evaluation.numbers['num_samples']} samples): {evaluation}",
            *class_lines(evaluation),
            *([utilization] if utilization else []),
            *compared,
            f"  {folder}/model/            {self._how_to_load()}, weights in {self.settings.training.save_dtype}",
            f"  {folder}/report.html       curves, results, worst mistakes: open it in a browser",
            f"  {folder}/predictions.jsonl every {evaluation.split} sample with its prediction",
            f"  {folder}/metrics.jsonl, eval.jsonl, config.json",
            *self._checkpoints(folder),
            *more,
            *self._next_command(),
        ]

    def _how_to_load(self) -> str:
        config = self.folder / "model" / "config.json"
        if not config.is_file():  # no class of transformers
            return "the weights, and what the model's own class saved"
        content = json.loads(config.read_text(encoding="utf-8"))
        return f"loads with {content['architectures'][0]}.from_pretrained"

    def _checkpoints(self, folder: str) -> list[str]:
        files = [file for file in (self.folder / "checkpoints").rglob("*") if file.is_file()]
        if not files:
            return []
        size, removed = size_text(sum(file.stat().st_size for file in files)), f"`toolkit clean {folder}` removes them"
        return [f"  {folder}/checkpoints/      {size}, any launch can resume from them; {removed}"]

    def _next_command(self) -> list[str]:
        """A feature's command, or one for another run with this script, data and strategy."""
        if command := first(feature.next_command(self.folder, self.settings) for feature in features()):
            return ["next:", f"  {command}"]
        training, again = self.settings.training, self.command()
        if not again:
            return []
        if str(self.settings.data.dataset_name).startswith(demo.PREFIX):  # as it was started, on the user's data
            words, file = shlex.split(again), launch.launch_info()["config_file"]
            words = words[: words.index(sys.argv[0]) + 1] + (["--config_file", file] if file else [])
            again = f"{shlex.join(words)} --train_file YOUR_FILE.csv --model_name_or_path bert-base-chinese"
        else:
            folder = f"{training.output_dir}-2" if training.output_dir else None
            again = self.command(seed=training.seed + 1, output_dir=folder)
            again += "  # another seed: what differs is chance"
        return ["next:", f"  {again}"]


def _world(accelerator: Accelerator) -> str:
    """`one process`, or `2 processes (deepspeed)`."""
    count, kind = accelerator.num_processes, accelerator.distributed_type.value.lower()
    return "one process" if kind == "no" else f"{count} process{'es' * (count > 1)} ({kind})"


def _left_out(report_to: str) -> str:
    """What a run does not write for want of a package; nothing where all are installed."""
    lacking = {} if is_installed("matplotlib") else {"report": "report.html will have no curves"}
    if report_to == "auto" and not is_installed("tensorboard"):
        lacking["tensorboard"] = "there will be no TensorBoard files"
    return f"{', '.join(lacking.values())}: {install_command(*lacking)}" if lacking else ""


def command_here(command: str) -> str:
    """A command as a shell finds it here: with its folder where the environment is not activated."""
    installed, on_path = Path(sys.executable).parent / command, shutil.which(command)
    if on_path and Path(on_path).resolve() == installed.resolve():
        return command
    return os.path.relpath(installed) if installed.exists() else command
