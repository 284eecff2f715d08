"""A run as its user sees it: its folder, its progress and what is left at the end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator

from toolkit.config import TaskSettings, flat
from toolkit.data import demo
from toolkit.data.prepare import TaskData
from toolkit.evaluation import Evaluation
from toolkit.report.files import RunFolder
from toolkit.report.progress import Progress
from toolkit.report.trackers import start_trackers, tracker_names
from toolkit.training.loop import Schedule, StepMetrics


class Run:
    """Opens `--output_dir` and records what happens; every process calls every method."""

    def __init__(
        self,
        accelerator: Accelerator,
        settings: TaskSettings,
        data: TaskData,
        schedule: Schedule,
        recipe: str,
    ) -> None:
        """Raises UserError where the folder already holds a run or a tracker is missing."""
        training = settings.training
        trackers = tracker_names(training.report_to)
        self.accelerator, self.settings, self.data = accelerator, settings, data
        self.folder = RunFolder(accelerator, training.output_dir, recipe, training.overwrite_output_dir)
        self.model_folder = self.folder.path / "model"
        self.started = time.monotonic()
        sizes = {split.name: len(split) for split in (data.train, data.validation, data.test) if split}
        self.folder.write_config(
            settings,
            accelerator,
            {"samples": sizes, "labels": list(data.labels.names), "problem_type": data.labels.problem_type,
             "max_length": data.max_length, "digest": data.digest, "notes": data.notes, **asdict(schedule)},
        )  # fmt: skip
        start_trackers(accelerator, trackers, "tensorboard" if trackers == ["tensorboard"] else recipe,
                       self.folder.path, flat(settings))  # fmt: skip
        self.progress = Progress(accelerator, schedule.total_steps)
        self._introduce(schedule, sizes)

    def _introduce(self, schedule: Schedule, sizes: dict[str, int]) -> None:
        accelerator, training = self.accelerator, self.settings.training
        note = demo.note_of(str(self.settings.model.model_name_or_path))
        per_step = f"{training.global_batch_size} samples per step"
        if schedule.accumulation > 1:
            per_step += f" ({schedule.accumulation} micro-batches on each process)"
        lines = [
            f"run folder: {self.folder.path}",
            f"{_world(accelerator)}, {accelerator.device.type}, mixed precision {accelerator.mixed_precision}",
            ", ".join(f"{split}: {count} samples" for split, count in sizes.items())
            + f"; {len(self.data.labels.names)} outputs: {', '.join(self.data.labels.names[:8])}"
            + ("..." if len(self.data.labels.names) > 8 else ""),
            *self.data.notes,
            f"{schedule.total_steps} optimizer steps, {schedule.steps_per_epoch} an epoch, {per_step}",
            *([note] if note else []),
        ]
        for line in lines:
            self.say(line)

    def say(self, line: str) -> None:
        self.progress.say(line)

    def step(self, metrics: StepMetrics) -> None:
        self.folder.append_metrics(metrics)
        numbers = {name: value for name, value in asdict(metrics).items() if name != "step"}
        self.accelerator.log({f"train/{name}": value for name, value in numbers.items()}, step=metrics.step)
        self.progress.step(metrics)

    def evaluation(self, evaluation: Evaluation, step: int, improved: bool) -> None:
        self.folder.append_evaluation(evaluation, step)
        self.folder.write_predictions(evaluation, self.data.labels)
        numbers = {
            f"{evaluation.split}/{name}": value
            for name, value in evaluation.numbers.items()
            if isinstance(value, float)
        }
        self.accelerator.log(numbers, step=step)
        self.progress.evaluation(evaluation, step, improved)

    def finish(self, last: Evaluation) -> None:
        """Writes the model card and report.html, and says where everything is."""
        self.progress.close()
        # not accelerator.end_training(), which also takes the process group down: see launch.failure
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if not self.folder.writes:
            return
        from toolkit.report.card import write_card  # matplotlib and jinja2, on one process
        from toolkit.report.html import write_report

        split = self.data.test if self.data.test and last.split == "test" else self.data.validation
        write_card(self.model_folder, self.folder.path, self.settings, self.data, last)
        write_report(self.folder.path, self.data.labels, last, split.texts())
        for line in self._summary(last):
            print(line, file=sys.stderr, flush=True)

    def _summary(self, last: Evaluation) -> list[str]:
        folder, script = self.folder.path, sys.argv[0]
        shown = "  ".join(f"{name} {value:.4f}" for name, value in last.numbers.items() if isinstance(value, float))
        return [
            "",
            f"done in {time.monotonic() - self.started:.0f} s; the saved model on {last.split} "
            f"({last.numbers['num_samples']} samples): {shown}",
            f"  {folder}/model/            loads with AutoModelForSequenceClassification.from_pretrained",
            f"  {folder}/report.html       curves, confusion matrix, worst mistakes: open it in a browser",
            f"  {folder}/predictions.jsonl every {last.split} sample with its probabilities",
            f"  {folder}/metrics.jsonl, eval.jsonl, config.json",
            "next:",
            f"  {typed('toolkit')} predict {folder}/model YOUR_FILE.csv",
            f"  {typed('python')} {script} --train_file YOUR_FILE.csv --model_name_or_path bert-base-chinese",
            f"  {typed('accelerate')} launch {script} --config_file accelerate_configs/zero2.yaml",
        ]


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
