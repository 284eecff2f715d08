"""A run as its recipe sees it: resumed, logged, evaluated, saved, finished.

`Run` only brings together what does the work: the folder (`training.run_folder`), the checkpoints
(`training.checkpoints`, `training.resume`), the log (`report.log`) and the report (`report.card`, `report.html`).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler

from toolkit import demo, launch
from toolkit.checkpoint.checksum import crc32, crc32_of_range
from toolkit.checkpoint.model_folder import load_weights, save_model
from toolkit.config import ModelSettings, TaskSettings, TitleSettings, flat
from toolkit.data.prepare import Prepared
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.evaluation import ComputeMetrics, Evaluation
from toolkit.evaluation.best import make_best
from toolkit.files import writing
from toolkit.launch import restarts
from toolkit.launch.signals import StopRequested
from toolkit.models import lora
from toolkit.report.files import RunFiles, by_step, read_lines
from toolkit.report.log import RunLog, class_lines, start_trackers, tracker_names
from toolkit.training import mfu
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.resume import Resume, Resumed
from toolkit.training.run_folder import RunFolder
from toolkit.training.steps import Step, StepMetrics, Steps
from toolkit.versions import versions

Evaluate = Callable[[Split], Evaluation]


class Run:
    """Opens `--output_dir`; every process calls every method."""

    def __init__(
        self,
        accelerator: Accelerator,
        settings: TaskSettings | TitleSettings,
        data: Prepared,
        tokenizer: Any,
        steps: Steps,
        compute_metrics: ComputeMetrics,
        recipe: str,
    ) -> None:
        """Raises UserError where the folder already holds a run, a tracker is missing, or `compute_metrics` does not
        return `--metric_for_best_model`."""
        self.accelerator, self.settings, self.data, self.tokenizer = accelerator, settings, data, tokenizer
        self._steps, self.schedule, self.recipe = steps, steps.schedule, recipe
        self.trackers = tracker_names(settings.training.report_to)
        self.facts = {
            "settings": flat(settings),
            "versions": versions(),
            "identity": _identity(accelerator, settings, data, recipe),
        }
        problem_type, size = data.facts["problem_type"], len(data.facts.get("labels", ()))
        self.best = make_best(accelerator, settings.training, problem_type, compute_metrics, data.validation, size)
        self.folder = RunFolder(accelerator, settings.training, recipe, self.facts)
        self.files = RunFiles(accelerator, self.folder.path)
        self.stopped = False
        """Whether a stop signal ended the training, with a checkpoint."""
        self._evaluated: tuple[int, str] | None = None
        self._last: Evaluation | None = None
        self._compared: tuple[int, Evaluation] | None = None
        self._started = time.monotonic()

    def resume(
        self, model: torch.nn.Module, optimizer: Any, scheduler: AcceleratedScheduler, evaluate: Evaluate | None = None
    ) -> None:
        """Loads the newest sound checkpoint of this run, where there is one, into what it is given, and opens the
        log. `evaluate` makes up for an evaluation that a stop signal put off. Raises UserError when its checkpoints are
        damaged or do not fit."""
        prepared = (self.accelerator, model, optimizer, scheduler)
        self._steps.utilization = mfu.utilization(self.accelerator, model)
        self.checkpoints = Checkpoints(*prepared, self.tokenizer, self._steps, self.best, self.folder.path, self.facts)
        resumed = Resume(self.checkpoints, self.folder.origin).from_newest()
        self._write_config(resumed)
        project = "tensorboard" if self.trackers == ["tensorboard"] else self.recipe
        done = self._steps.done
        start_trackers(self.accelerator, self.trackers, project, self.folder.path, flat(self.settings), done)
        self._log = RunLog(self.accelerator, self.files, self.schedule.total_steps, done)
        for line in [*self._introduction(), *(resumed.lines if resumed else []), *self.checkpoints.notes()]:
            self.say(line)
        if evaluate and resumed and resumed.manifest.get("evaluation_left"):
            self._evaluate(evaluate, done)
            self.checkpoints.point_best()

    def say(self, line: str) -> None:
        """Prints a line, on one process."""
        self._log.say(line)

    def steps(self) -> Iterator[Step]:
        """Yields the steps that are left, until the last one, a stop signal, or too many evaluations without a better
        one."""
        for step in self._steps:
            if self.best.gives_up:
                self.say(f"no better {self.best.metric} in {self.best.waited} evaluations: stopping early")
                return
            step.learning_rate = float(self.checkpoints.scheduler.get_last_lr()[0])
            self._evaluation_left = False
            yield step
            if self._steps.stop_signal:
                self._stop()
                return

    def log(self, step: Step, grad_norm: Any) -> None:
        """Logs a finished step; losses are gathered here, of `--logging_steps` steps at once. Raises UserError where
        one is not finite, after those before it are logged."""
        self._gathered: StepMetrics | None = None
        try:
            for metrics in self._steps.finish(step, grad_norm):
                self._log.log_step(metrics)
                self._gathered = metrics
        except UserError:
            self._log.write_line()
            raise

    def evaluate_if_due(self, step: Step, evaluate: Evaluate) -> None:
        """Evaluates the validation rows where that is due (`--eval_every`), and saves the model where it is the best so
        far. A stop signal puts the evaluation off until the run goes on: the checkpoint comes first."""
        if step.evaluates:
            self._evaluation_left = bool(self._steps.stop_signal) or not self._evaluate(evaluate, step.number)

    def checkpoint_if_due(self, step: Step) -> None:
        """Saves a checkpoint where one is due (`--checkpoint_every`), or a stop signal came."""
        if self._gathered is not None:  # as it is before each checkpoint
            self._log.write_line(self.checkpoints.save_if_due(self._gathered, self._evaluation_left))

    def _evaluate(self, evaluate: Evaluate, step: int) -> bool:
        """False where a stop signal came before its end."""
        try:
            evaluation = evaluate(self.data.validation)
        except StopRequested as stop:
            self._steps.stop_signal = stop.number
            return False
        improved = self.best.improved(evaluation, step)
        if improved:
            with writing(self.folder.model):
                save_model(self.accelerator, self.checkpoints.model, self.tokenizer, self.folder.model, step)
        self._log_evaluation(evaluation, step, improved)
        return True

    def _log_evaluation(self, evaluation: Evaluation, step: int, improved: bool = False) -> None:
        self._last, self._evaluated = evaluation, (step, evaluation.split)
        self._log.log_evaluation(evaluation, step, improved)

    def _stop(self) -> None:
        self._close()
        self.stopped = True
        launch.stopped_by(self._steps.stop_signal)
        again = "the same command" + (
            "" if self.settings.training.output_dir else f" with --output_dir {self.folder.path}"
        )
        self.say(
            f"stopped by {signal.Signals(self._steps.stop_signal).name} after step {self._steps.done} of "
            f"{self.schedule.total_steps}, with a checkpoint in {self.folder.path / 'checkpoints' / 'last'}: {again} "
            "goes on from there"
        )

    def _close(self) -> None:
        self.checkpoints.wait()
        self._log.close()

    def load_best_model(self) -> None:
        """Puts the weights of model/ into the model, where training went on after them."""
        if self.best.step != self._steps.done:
            load_weights(self.accelerator, self.checkpoints.model, self.folder.model)

    def evaluation_of(self, split: Split) -> Evaluation | None:
        """The last evaluation, where it was of the best model and this split."""
        return self._last if self._evaluated == (self.best.step, split.name) else None

    def log_comparison(self, evaluation: Evaluation, max_length: int) -> None:
        """Records what the best model makes of the same samples, cut at `max_length` tokens."""
        self.files.append_evaluation(evaluation, self.best.step, max_length=max_length)
        self._compared = (max_length, evaluation)

    def finish(self, evaluation: Evaluation) -> None:
        """Logs the evaluation of the best model, writes the model card and report.html, and says where everything
        is."""
        if evaluation is not self._last:
            self._log_evaluation(evaluation, self.best.step)
        self._close()
        if not self.accelerator.is_main_process:
            return
        from toolkit.report.card import write_card  # matplotlib and jinja2, on one process
        from toolkit.report.html import write_report

        split = self.data.test if self.data.test and evaluation.split == "test" else self.data.validation
        write_card(self.folder.model, self.folder.path, evaluation)
        write_report(self.folder.path, evaluation, split.texts())
        for line in self._summary(evaluation):
            print(line, file=sys.stderr, flush=True)

    def _write_config(self, resumed: Resumed | None) -> None:
        data = self.data
        self.files.go_on_from(resumed.manifest if resumed else None, bool(resumed and resumed.ours))
        learned = {
            "samples": data.sizes, **data.facts, "text_column": data.text_column, "max_length": data.max_length,
            "digest": data.digest, "notes": data.notes, **asdict(self.schedule),
        }  # fmt: skip
        more = {
            "identity": self.facts["identity"],
            "model_class": type(self.accelerator.unwrap_model(self.checkpoints.model)).__name__,
            "optimizer": _optimizer_name(self.checkpoints.optimizer),
            "resumed_from": str(resumed.folder) if resumed else None,
        }
        self.files.write_config(self.settings, self.accelerator, learned, more)

    def _introduction(self) -> list[str]:
        accelerator, settings, data, schedule = self.accelerator, self.settings, self.data, self.schedule
        per_step = f"{settings.training.global_batch_size} samples per step"
        if schedule.accumulation > 1:
            uneven = settings.training.max_tokens_per_batch is not None or data.train.buckets is not None
            at_most = "at most " if uneven else ""
            per_step += f" ({at_most}{schedule.accumulation} micro-batches on each process)"
        named = launch.named_machines()
        lines = [
            f"attempt {restarts.attempt() + 1} of {restarts.most_restarts() + 1}" if restarts.attempt() else "",
            f"run folder: {self.folder.path}",
            f"{_world(accelerator)}, {accelerator.device.type}, mixed precision {accelerator.mixed_precision}",
            f"machines: {', '.join(named)}" if named else "",
            ", ".join(f"{split}: {count} samples" for split, count in data.sizes.items())
            + f"; {data.targets.describe()}",
            f"texts: column {data.text_column}, at most {data.max_length} tokens",
            *data.notes,
            f"{schedule.total_steps} optimizer steps, {schedule.steps_per_epoch} an epoch, {per_step}",
            demo.about(settings.model.model_name_or_path).note,
            demo.about(settings.data.dataset_name).note,
        ]
        if isinstance(settings.model, ModelSettings) and settings.model.lora_r:
            lines.append(lora.describe(self.checkpoints.model, settings.model))
        return [line for line in lines if line]

    def _summary(self, last: Evaluation) -> list[str]:
        folder, script = shlex.quote(str(self.folder.path)), shlex.quote(sys.argv[0])
        saved = (self.folder.path / "checkpoints").is_dir()
        loads, config = "weights and what it saved", self.folder.model / "config.json"
        if named := config.is_file():  # a class of transformers
            architecture = json.loads(config.read_text(encoding="utf-8"))["architectures"][0]
            loads = f"loads with {architecture}.from_pretrained"
        compared = []
        if self._compared is not None:
            most, other = self._compared
            name = f"the same model reading the first {most} tokens only"
            compared = [f"{name}: {other} (reading {self.data.max_length}: {last})"]
        return [
            "",
            f"done in {time.monotonic() - self._started:.0f} s; the saved model on {last.split} "
            f"({last.numbers['num_samples']} samples): {last}",
            *class_lines(last),
            *filter(None, [mfu.describe(by_step(read_lines(self.folder.path / "metrics.jsonl")))]),
            *compared,
            f"  {folder}/model/            {loads}",
            f"  {folder}/report.html       curves, results, worst samples: open it in a browser",
            f"  {folder}/predictions.jsonl every {last.split} sample with what was predicted",
            f"  {folder}/metrics.jsonl, eval.jsonl, config.json",
            *([f"  {folder}/checkpoints/last  resumes under any launch"] if saved else []),
            "next:",
            *([f"  {typed('toolkit')} predict {folder}/model YOUR_FILE.csv"] if named else []),
            f"  {typed('python')} {script} --train_file YOUR_FILE.csv --model_name_or_path bert-base-chinese",
            f"  {typed('accelerate')} launch {script} --config_file accelerate_configs/zero2.yaml",
        ]


def _optimizer_name(optimizer: Any) -> str:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return type(optimizer).__name__


def _identity(
    accelerator: Accelerator, settings: TaskSettings | TitleSettings, data: Prepared, recipe: str
) -> dict[str, Any]:
    """What a checkpoint and the run that goes on from it must have in common; JSON."""
    model, training = settings.model, settings.training
    name = str(model.model_name_or_path)
    return {
        "recipe": recipe,
        "model": _content_of(Path(name)) if accelerator.is_main_process and Path(name).is_dir() else name,
        **data.facts,
        "data": data.digest,
        "max_length": data.max_length,
        "global_batch_size": training.global_batch_size,
        "group_by_length": training.group_by_length,
        "seed": training.seed,
        **{name: getattr(model, name, None) for name in ("lora_r", "lora_alpha", "lora_target_modules")},
    }


def _content_of(model: Path) -> str:
    """The same for a folder that was moved or copied: a checksum of its config and its weights."""
    files = sorted(
        path for path in model.iterdir() if path.name == "config.json" or path.suffix in (".safetensors", ".bin")
    )
    text = " ".join(f"{path.name} {crc32_of_range(path):08x}" for path in files)
    return f"{crc32(text.encode()):08x}"


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
