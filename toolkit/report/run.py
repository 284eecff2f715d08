"""A run as its user sees it: its folder, its progress and what is left at the end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit import launch
from toolkit.checkpoint.model_folder import save_model
from toolkit.config import ModelSettings, TaskSettings, TitleSettings, flat
from toolkit.data import demo
from toolkit.data.prepare import Prepared
from toolkit.evaluation import Best, Evaluation
from toolkit.launch import restarts
from toolkit.models import lora
from toolkit.report.files import RunFolder
from toolkit.report.progress import Progress
from toolkit.report.trackers import start_trackers, tracker_names
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.loop import Loop, Schedule, Step, StepMetrics
from toolkit.versions import versions


class Run:
    """Opens `--output_dir` and records what happens; every process calls every method."""

    def __init__(
        self,
        accelerator: Accelerator,
        settings: TaskSettings | TitleSettings,
        data: Prepared,
        schedule: Schedule,
        recipe: str,
        model: torch.nn.Module | None = None,
    ) -> None:
        """Raises UserError where the folder already holds a run or a tracker is missing.

        `model` is for what is said of its trained parameters.
        """
        self.accelerator, self.settings, self.data = accelerator, settings, data
        self.schedule, self.recipe, self.model = schedule, recipe, model
        self.trackers = tracker_names(settings.training.report_to)
        self.facts = {"settings": flat(settings), "versions": versions(), "identity": _identity(settings, data, recipe)}
        self.folder = RunFolder(accelerator, settings.training, recipe, self.facts)
        self.model_folder = self.folder.path / "model"
        self.compared: tuple[int, Evaluation] | None = None
        self.started = time.monotonic()

    def start(self, loop: Loop, best: Best) -> None:
        """Opens the files, after the state of an earlier start of the run has been taken up where there is
        one; says what is going to happen. Raises UserError when its checkpoints are damaged or do not fit."""
        settings, schedule, folder = self.settings, self.schedule, self.folder
        self.loop, self.best = loop, best
        self.checkpoints = Checkpoints(loop, best, folder.path, folder.origin, self.facts)
        resumed = self.checkpoints.resume()
        folder.go_on_from(*((resumed.step, resumed.metrics, resumed.evaluations) if resumed else (0, None, 0)))
        data = self.data
        folder.write_config(
            settings,
            self.accelerator,
            {"samples": data.sizes, **data.facts, "text_column": data.text_column,
             "max_length": data.max_length, "digest": data.digest, "notes": data.notes, **asdict(schedule)},
            {"identity": self.facts["identity"], "resumed_from": str(resumed.folder) if resumed else None},
        )  # fmt: skip
        project = "tensorboard" if self.trackers == ["tensorboard"] else self.recipe
        start_trackers(self.accelerator, self.trackers, project, folder.path, flat(settings), loop.done)
        self.progress = Progress(self.accelerator, schedule.total_steps, loop.done)
        self._introduce(schedule)
        if self.model is not None and isinstance(settings.model, ModelSettings) and settings.model.lora_r:
            self.say(lora.describe(self.model, settings.model))
        for line in [*(resumed.lines if resumed else []), *self.checkpoints.notes()]:
            self.say(line)

    def _introduce(self, schedule: Schedule) -> None:
        accelerator, settings = self.accelerator, self.settings
        training = settings.training
        notes = [
            demo.note_of(str(settings.model.model_name_or_path)),
            demo.data_note_of(str(settings.data.dataset_name)),
        ]
        per_step = f"{training.global_batch_size} samples per step"
        if schedule.accumulation > 1:
            uneven = training.max_tokens_per_batch is not None or self.data.train.sparse is not None
            at_most = "at most " if uneven else ""
            per_step += f" ({at_most}{schedule.accumulation} micro-batches on each process)"
        lines = [
            *([f"attempt {restarts.attempt() + 1} of {restarts.most_restarts() + 1}"] if restarts.attempt() else []),
            f"run folder: {self.folder.path}",
            f"{_world(accelerator)}, {accelerator.device.type}, mixed precision {accelerator.mixed_precision}",
            *([f"machines: {', '.join(machines)}"] if (machines := launch.named_machines()) else []),
            ", ".join(f"{split}: {count} samples" for split, count in self.data.sizes.items())
            + f"; {self.data.outputs}",
            f"texts: column {self.data.text_column}, at most {self.data.max_length} tokens",
            *self.data.notes,
            f"{schedule.total_steps} optimizer steps, {schedule.steps_per_epoch} an epoch, {per_step}",
            *filter(None, notes),
        ]
        for line in lines:
            self.say(line)

    def say(self, line: str) -> None:
        self.progress.say(line)

    def steps(self) -> Iterator[Step]:
        """The loop's steps, until the last, or until no evaluation has been better for too long."""
        for step in self.loop.steps():
            if self.best.gives_up:
                self.say(f"no better {self.best.metric} in {self.best.waited} evaluations: stopping early")
                return
            yield step

    def step(self, metrics: StepMetrics) -> None:
        """Shows a step that is done."""
        numbers = {name: value for name, value in asdict(metrics).items() if name != "step"}
        self.accelerator.log({f"train/{name}": value for name, value in numbers.items()}, step=metrics.step)
        self.progress.step(metrics)

    def record(self, step: Step, metrics: StepMetrics) -> None:
        """Takes a checkpoint where one is due, and writes the step's line: the last thing that happens in a step."""
        self.folder.append_metrics(metrics, self.checkpoints.after(step, metrics))

    def evaluated(self, evaluation: Evaluation, step: int) -> None:
        """Records an evaluation of the model as it is after `step`, and saves the model where it is the best so far."""
        improved = self.best.improved(evaluation, step)
        if improved:
            save_model(self.accelerator, self.loop.model, self.loop.tokenizer, self.model_folder, step)
        self.evaluation(evaluation, step, improved)

    def evaluation(self, evaluation: Evaluation, step: int, improved: bool = False) -> None:
        """Records an evaluation of the weights of `step`."""
        self.folder.append_evaluation(evaluation, step)
        self.folder.write_predictions(evaluation)
        numbers = {
            f"{evaluation.split}/{name}": value
            for name, value in evaluation.numbers.items()
            if isinstance(value, float)
        }
        self.accelerator.log(numbers, step=step)
        self.progress.evaluation(evaluation, step, improved)

    def comparison(self, evaluation: Evaluation, step: int, max_length: int) -> None:
        """Records what the saved model makes of the same samples, cut at `max_length` tokens."""
        self.folder.append_evaluation(evaluation, step, max_length=max_length)
        self.compared = (max_length, evaluation)

    def stop(self) -> None:
        """Ends a run that was told to stop, and says how it goes on."""
        loop = self.loop
        self._close()
        restarts.tell_launcher(restarts.STOPPED)
        again = "the same command" + (
            "" if self.settings.training.output_dir else f" with --output_dir {self.folder.path}"
        )
        self.say(
            f"stopped by {signal.Signals(loop.told).name} after step {loop.done} of {self.schedule.total_steps}, with "
            f"a checkpoint in {self.folder.path / 'checkpoints' / 'last'}: {again} goes on from there"
        )

    def _close(self) -> None:
        self.checkpoints.wait()
        self.progress.close()
        # not accelerator.end_training(), which also takes the process group down: see launch.failure
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def finish(self, last: Evaluation) -> None:
        """Writes the model card and report.html, and says where everything is."""
        self._close()
        if not self.folder.writes:
            return
        from toolkit.report.card import write_card  # matplotlib and jinja2, on one process
        from toolkit.report.html import write_report

        split = self.data.test if self.data.test and last.split == "test" else self.data.validation
        write_card(self.model_folder, self.folder.path, self.settings, self.data, last)
        write_report(self.folder.path, last, split.texts())
        for line in self._summary(last):
            print(line, file=sys.stderr, flush=True)

    def _summary(self, last: Evaluation) -> list[str]:
        folder, script = shlex.quote(str(self.folder.path)), shlex.quote(sys.argv[0])
        architecture = json.loads((self.model_folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        saved = (self.folder.path / "checkpoints").is_dir()
        compared = []
        if self.compared is not None:
            most, other = self.compared
            name = f"the same model reading the first {most} tokens only"
            compared = [f"{name}: {_shown(other)} (reading {self.data.max_length}: {_shown(last)})"]
        return [
            "",
            f"done in {time.monotonic() - self.started:.0f} s; the saved model on {last.split} "
            f"({last.numbers['num_samples']} samples): {_shown(last)}",
            *compared,
            f"  {folder}/model/            loads with {architecture}.from_pretrained",
            f"  {folder}/report.html       curves, results, worst samples: open it in a browser",
            f"  {folder}/predictions.jsonl every {last.split} sample with what was predicted",
            f"  {folder}/metrics.jsonl, eval.jsonl, config.json",
            *([f"  {folder}/checkpoints/last  resumes under any launch"] if saved else []),
            "next:",
            f"  {typed('toolkit')} predict {folder}/model YOUR_FILE.csv",
            f"  {typed('python')} {script} --train_file YOUR_FILE.csv --model_name_or_path bert-base-chinese",
            f"  {typed('accelerate')} launch {script} --config_file accelerate_configs/zero2.yaml",
        ]


def _shown(evaluation: Evaluation) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in evaluation.numbers.items() if isinstance(value, float))


def _identity(settings: TaskSettings | TitleSettings, data: Prepared, recipe: str) -> dict[str, Any]:
    """What a checkpoint and the run that goes on from it must have in common; JSON."""
    model, training = settings.model, settings.training
    return {
        "recipe": recipe,
        "model": str(model.model_name_or_path),
        **data.facts,
        "data": data.digest,
        "max_length": data.max_length,
        "global_batch_size": training.global_batch_size,
        "group_by_length": training.group_by_length,
        "seed": training.seed,
        **{name: getattr(model, name, None) for name in ("lora_r", "lora_alpha", "lora_target_modules")},
    }


def _world(accelerator: Accelerator) -> str:
    """`one process`, or `2 processes (deepspeed)`."""
    count, kind = accelerator.num_processes, accelerator.distributed_type.value.lower()
    return "one process" if kind == "no" else f"{count} process{'es' * (count > 1)} ({kind})"


def typed(command: str) -> str:
    """A command as it must be typed here: with its folder where the environment is not activated."""
    ours = Path(sys.executable).parent / command
    on_path = shutil.which(command)
    if on_path and Path(on_path).resolve() == ours.resolve():
        return command
    return os.path.relpath(ours) if ours.exists() else command
