"""A run as its recipe sees it: resumed, logged, evaluated, saved, finished.

`Run` only brings together what does the work: the folder (`training.run_folder`), the checkpoints
(`training.checkpoints`, `training.resume`), the log (`report.log`) and the report (`report.card`, `report.html`).
"""

from __future__ import annotations

import contextlib
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
from accelerate.utils import broadcast_object_list

from toolkit import demo, launch
from toolkit.checkpoint.checksum import crc32, crc32_of_range
from toolkit.checkpoint.convert.model_files import DECISIONS
from toolkit.checkpoint.live import unwrapped
from toolkit.checkpoint.model_folder import load_weights, save_model
from toolkit.config import ModelSettings, TaskSettings, flat, section_in
from toolkit.data.prepare import Prepared
from toolkit.data.tokens import Split
from toolkit.errors import UserError, first_line
from toolkit.evaluation import ComputeMetrics, Evaluation, decided_evaluation
from toolkit.evaluation.best import make_best
from toolkit.features.baselines.feature import BaselineSettings
from toolkit.features.decisions import decisions
from toolkit.features.decisions.feature import DecisionSettings
from toolkit.features.folds import split as folds
from toolkit.launch import restarts
from toolkit.launch.signals import StopRequested
from toolkit.models import lora
from toolkit.report.files import RunFiles, by_step, read_lines, write_whole
from toolkit.report.log import RunLog, class_lines, start_trackers, tracker_names
from toolkit.report.record import last_evaluation
from toolkit.training import mfu
from toolkit.training.average import Average
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.resume import Resume, Resumed
from toolkit.training.run_folder import RunFolder
from toolkit.training.steps import Step, StepMetrics, Steps
from toolkit.utils.files import writing
from toolkit.utils.units import size_text
from toolkit.utils.versions import versions

Evaluate = Callable[[Split], Evaluation]


class Run:
    """Opens `--output_dir`; every process calls every method."""

    def __init__(
        self,
        accelerator: Accelerator,
        settings: Any,
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
        if data.fold:
            settings = self.settings = folds.settings_of(accelerator, settings, data.fold)
        tracker_names(settings.training.report_to)  # a missing package is told before the folder is made
        self.facts = {
            "settings": flat(settings),
            "versions": versions(),
            "identity": _identity(accelerator, settings, data, recipe),
        }
        problem_type, size = data.facts["problem_type"], len(data.facts.get("labels", ()))
        self.best = make_best(accelerator, settings.training, problem_type, compute_metrics, data.validation, size)
        self.folder = RunFolder(accelerator, settings.training, recipe, self.facts)
        self.files = RunFiles(accelerator, self.folder.path)
        asked = section_in(settings, DecisionSettings)
        self._asked = asked if asked.any and decisions.check_asked(asked, data.labels) else None
        self._decisions: decisions.Decisions | None = None
        self._compute_metrics = compute_metrics
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
        log. `evaluate` makes up for an evaluation that a stop signal put off, and finds thresholds and a temperature.
        Raises UserError when its checkpoints are damaged or do not fit."""
        if self._asked and evaluate is None:
            raise UserError("--tune_thresholds, --calibrate and --abstain_below need run.resume(..., evaluate)")
        self._evaluate_split = evaluate
        prepared = (self.accelerator, model, optimizer, scheduler)
        self._steps.utilization = mfu.utilization(self.accelerator, model)
        self.checkpoints = Checkpoints(*prepared, self.tokenizer, self._steps, self.best, self.folder.path, self.facts)
        decay = self.settings.training.ema_decay
        self._average = None if decay is None else Average(self.checkpoints.live, decay)
        resumed = Resume(self.checkpoints, self.folder.origin).from_newest()
        self._write_config(resumed)
        done, shown = self._steps.done, self.facts["settings"]
        start_trackers(self.accelerator, self.settings.training, self.folder.path, self.recipe, shown, done)
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
                self.say(f"{self.best.metric} has not improved in {self.best.waited} evaluations: stopping early")
                return
            step.learning_rate = float(self.checkpoints.scheduler.get_last_lr()[0])
            self._evaluation_left = False
            yield step
            if self._steps.stop_signal:
                self._stop()
                return

    def log(self, step: Step, grad_norm: Any) -> None:
        """Takes a finished step's weights into their average (`--ema_decay`), and logs it; losses are gathered here, of
        `--logging_steps` steps at once. Raises UserError where one is not finite, after those before it are logged."""
        if self._average and not self.checkpoints.optimizer.step_was_skipped:
            self._average.update(self.checkpoints.scheduler.scheduler.last_epoch)
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
        with self._average.as_weights(step) if self._average else contextlib.nullcontext():
            try:
                evaluation = evaluate(self.data.validation)
            except StopRequested as stop:
                self._steps.stop_signal = stop.number
                return False
            improved = self.best.improved(evaluation, step)
            if improved:
                with writing(self.folder.model):
                    model, dtype = self.checkpoints.model, self.settings.training.save_dtype
                    save_model(self.accelerator, model, self.tokenizer, self.folder.model, step, dtype)
        self._log_evaluation(evaluation, step, improved)
        return True

    def _log_evaluation(self, evaluation: Evaluation, step: int, improved: bool = False) -> None:
        self._last, self._evaluated = evaluation, (step, evaluation.split)
        self._log.log_evaluation(evaluation, step, improved)

    def _stop(self) -> None:
        self._close()
        self.stopped = True
        launch.stopped_by(self._steps.stop_signal)
        name, done, given = signal.Signals(self._steps.stop_signal).name, self._steps.done, self.settings.training
        command = (
            self._command(
                output_dir=None if given.output_dir else self.folder.path,
                overwrite_output_dir="false" if given.overwrite_output_dir else None,
                resume=None if given.resume == "auto" else "auto",
            )
            or f"the same call, with output_dir={str(self.folder.path)!r}"
        )
        self.say(
            f"stopped by {name} after step {done} of {self.schedule.total_steps}, with a checkpoint in "
            f"{self.folder.path / 'checkpoints' / 'last'}; to continue: {command}"
        )
        try:
            self.files.mark_stopped(signal=name, step=done, command=command)
            if self.accelerator.is_main_process:
                self._write_pages()
        except (OSError, ValueError, UserError) as error:  # of the page only: the checkpoint is there
            self.say(f"no report of the stopped run: {first_line(error)}")

    def _close(self) -> None:
        self.checkpoints.wait()
        self._log.close()

    def load_best_model(self) -> None:
        """Puts the weights of model/ into the model, where training went on after them, and finds its thresholds and
        temperature on the validation rows, where they are asked for."""
        if self.best.step != self._steps.done or self.settings.training.ema_decay is not None:
            load_weights(self.accelerator, self.checkpoints.model, self.folder.model)
        path, validation = self.folder.model / DECISIONS, self.data.validation
        if self._asked and self._evaluate_split and self.evaluation_of(validation) is None:
            self._last, self._evaluated = self._evaluate_split(validation), (self.best.step, validation.name)
        if not self.accelerator.is_main_process:
            return
        path.unlink(missing_ok=True)  # of the same run with other settings
        if self._asked and self._last:
            self._decisions, said = decisions.tuned(self._asked, self.data.labels, self._last)
            write_whole(path, [decisions.write_text(self._decisions, self._asked, self.best.step)])
            for line in said:
                self.say(line)

    def _decided(self, evaluation: Evaluation) -> Evaluation:
        if self._decisions is None:
            return evaluation
        return decided_evaluation(evaluation, self._decisions, self._compute_metrics)

    def evaluation_of(self, split: Split) -> Evaluation | None:
        """The last evaluation, where it was of the best model and this split."""
        return self._last if self._evaluated == (self.best.step, split.name) else None

    def log_comparison(self, evaluation: Evaluation, max_length: int) -> None:
        """Records what the best model makes of the same samples, cut at `max_length` tokens."""
        evaluation = self._decided(evaluation)
        self.files.append_evaluation(evaluation, self.best.step, max_length=max_length)
        self._compared = (max_length, evaluation)

    def finish(self, evaluation: Evaluation) -> None:
        """Logs the evaluation of the best model, writes the model card and report.html, and says where everything
        is."""
        evaluation = self._decided(evaluation)
        if evaluation is not self._last:
            self._log_evaluation(evaluation, self.best.step)
        self._close()
        if self.accelerator.is_main_process:
            from toolkit.features.baselines.baselines import write_baselines

            outputs = evaluation.outputs if section_in(self.settings, BaselineSettings).baselines else None
            compared = write_baselines(self.folder.path, self.data, outputs, self._decisions)
            self._write_pages()
            for line in self._summary(evaluation, compared):
                print(line, file=sys.stderr, flush=True)
        if self.data.fold:
            self._finish_fold(evaluation)

    def _finish_fold(self, evaluation: Evaluation) -> None:
        """Keeps what this fold's model says of its part; after the last one brings all parts together."""
        from toolkit.features.folds.page import write_folds, write_part

        all_folds, left = self.folder.path.parent, 0
        if self.accelerator.is_main_process and evaluation.predictions:
            write_part(
                self.folder.path,
                self.data.fold or 0,
                self.data.validation,
                list(evaluation.predictions()),
            )
            left = len(folds.unfinished(all_folds))
            for line in [f"{left} folds are left"] if left else write_folds(all_folds):
                print(line, file=sys.stderr, flush=True)
        if broadcast_object_list([left])[0]:
            launch.once_more()

    def _write_pages(self) -> None:
        """The model card, where there is a model, and report.html, from the run's files; on one process."""
        from toolkit.report.card import write_card  # matplotlib and jinja2
        from toolkit.report.html import write_report_of_folder

        if self.best.step:
            write_card(self.folder.model, self.folder.path, last_evaluation(self.folder.path, self.best.step))
        write_report_of_folder(self.folder.path)

    def _command(self, **settings: Any) -> str:
        """What was typed, with these settings in it; nothing in a notebook or a script that has its own."""
        from_demo = str(self.settings.data.dataset_name).startswith(demo.PREFIX)
        if "ipykernel" in sys.modules or not (from_demo or sys.argv[1:]):
            return ""
        words = shlex.split(launch.how_launched()["command"])
        for name, value in settings.items():
            if value is not None:
                place = words.index(f"--{name}") if f"--{name}" in words else len(words)
                given = 2 if len(words) > place + 1 and not words[place + 1].startswith("--") else 1
                words[place : place + given] = [f"--{name}", str(value)]
        return shlex.join([typed(words[0]), *words[1:]])

    def _write_config(self, resumed: Resumed | None) -> None:
        data = self.data
        self.files.go_on_from(resumed.manifest if resumed else None, bool(resumed and resumed.ours))
        learned = {
            "samples": data.sizes, **data.facts, "text_column": data.text_column, "max_length": data.max_length,
            "digest": data.digest, "notes": data.notes, **asdict(self.schedule),
        }  # fmt: skip
        more = {
            "identity": self.facts["identity"],
            "model_class": type(unwrapped(self.checkpoints.model)).__name__,
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
            data.advice,
            f"{schedule.total_steps} optimizer steps, {schedule.steps_per_epoch} per epoch, {per_step}",
            demo.about(settings.model.model_name_or_path).note,
            demo.about(settings.data.dataset_name).note,
        ]
        if isinstance(settings.model, ModelSettings) and settings.model.lora_r:
            lines.append(lora.describe(self.checkpoints.model, settings.model))
        return [line for line in lines if line]

    def _summary(self, last: Evaluation, beside: list[str]) -> list[str]:
        path, folder = self.folder.path, shlex.quote(str(self.folder.path))
        loads, config = "the weights, and what the model's own class saved", self.folder.model / "config.json"
        if named := config.is_file():  # a class of transformers
            told = json.loads(config.read_text(encoding="utf-8"))
            loads = f"loads with {told['architectures'][0]}.from_pretrained"
            if "auto_map" in told:  # toolkit.pooled
                loads = "loads with AutoModelForSequenceClassification.from_pretrained(..., trust_remote_code=True)"
        explains = (
            f" (`toolkit report {folder} --explain 5`: which words led to them)"
            if isinstance(self.settings, TaskSettings)
            else ""
        )
        compared, checkpoints = [], []
        if self._compared is not None:
            most, other = self._compared
            name = f"the same model reading the first {most} tokens only"
            compared = [f"{name}: {other} (reading {self.data.max_length}: {last})"]
        saved = [file for file in (path / "checkpoints").rglob("*") if file.is_file()]
        if saved:
            size = size_text(sum(file.stat().st_size for file in saved))
            removed = f"`toolkit clean {folder}` removes them"
            checkpoints = [f"  {folder}/checkpoints/      {size}, any launch can resume from them; {removed}"]
        return [
            "",
            f"done in {time.monotonic() - self._started:.0f} s; the saved model on {last.split} "
            f"({last.numbers['num_samples']} samples): {last}",
            *class_lines(last),
            *beside,
            *decisions.lines_of(last),
            *filter(None, [mfu.describe(by_step(read_lines(self.folder.path / "metrics.jsonl")))]),
            *compared,
            f"  {folder}/model/            {loads}, weights in {self.settings.training.save_dtype}",
            f"  {folder}/report.html       curves, results, worst mistakes: open it in a browser{explains}",
            f"  {folder}/predictions.jsonl every {last.split} sample with its prediction",
            f"  {folder}/metrics.jsonl, eval.jsonl, config.json",
            *checkpoints,
            *self._next("" if self.data.fold else f"{typed('toolkit')} predict {folder}/model" if named else ""),
        ]

    def _next(self, predict: str) -> list[str]:
        """What to type now: of this run's model, and with its script, data and strategy."""
        training, again = self.settings.training, "" if self.data.fold else self._command()
        if again and str(self.settings.data.dataset_name).startswith(demo.PREFIX):  # as it was started, with own data
            words, file = shlex.split(again), launch.how_launched()["config_file"]
            words = words[: words.index(sys.argv[0]) + 1] + (["--config_file", file] if file else [])
            again = f"{shlex.join(words)} --train_file YOUR_FILE.csv --model_name_or_path bert-base-chinese"
        elif again:  # once more: what another seed changes is chance
            folder = f"{training.output_dir}-2" if training.output_dir else None
            again = (
                self._command(seed=training.seed + 1, output_dir=folder) + "  # another seed: what differs is chance"
            )
        lines = [f"  {line}" for line in (predict and f"{predict} YOUR_FILE.csv", again) if line]
        return ["next:", *lines] if lines else []


def _optimizer_name(optimizer: Any) -> str:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return type(optimizer).__name__


def _identity(accelerator: Accelerator, settings: Any, data: Prepared, recipe: str) -> dict[str, Any]:
    """What a checkpoint and the run that goes on from it must have in common; JSON."""
    model, training = settings.model, settings.training

    def content(name: str) -> str:
        return _content_of(Path(name)) if accelerator.is_main_process and Path(name).is_dir() else name

    distillation = getattr(settings, "distillation", None)
    return {
        "recipe": recipe,
        "model": content(str(model.model_name_or_path)),
        **({"teacher": content(distillation.teacher)} if distillation and distillation.teacher else {}),
        **{name: given for name in ("num_hidden_layers", "pooling") if (given := getattr(model, name, None))},
        **data.facts,
        "data": data.digest,
        "max_length": data.max_length,
        "global_batch_size": training.global_batch_size,
        "group_by_length": training.group_by_length,
        "seed": training.seed,
        "sampling": settings.objective.sampling if isinstance(settings, TaskSettings) else None,
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
