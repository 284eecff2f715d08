"""What a run logs and prints: metrics.jsonl and eval.jsonl, trackers (`--report_to`), the lines at its start and end,
and the pages that it writes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tqdm import tqdm

from toolkit import demo, launch
from toolkit.config import ModelSettings, TrainingSettings
from toolkit.data.prepare import Data
from toolkit.errors import UserError, did_you_mean, first_line, size_text
from toolkit.evaluation import Evaluation
from toolkit.launch.environment import attempt, max_restarts
from toolkit.models import lora
from toolkit.report.files import RunFiles, architecture, last_evaluation
from toolkit.training.metrics import StepMetrics
from toolkit.training.schedule import Schedule
from toolkit.utils.extras import install_command, is_installed

TRACKERS = (
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "trackio",
)  # these are also the names of their packages
_LOG_EVERY_SECONDS = 10.0
_MAX_CLASSES = 20


class RunLog:
    """Logs steps and evaluations to files, trackers and the terminal. All ranks call every method."""

    def __init__(
        self, accelerator: Accelerator, files: RunFiles, total_steps: int, done: int
    ) -> None:
        """`done`: the step that the run resumes from."""
        self.accelerator, self.files, self.total, self.done = accelerator, files, total_steps, done
        self._started = self._printed = time.monotonic()
        hidden = None if files.writes else True  # None: without a terminal
        self._bar = tqdm(
            total=total_steps, initial=done, unit="step", dynamic_ncols=True, disable=hidden
        )
        self._line: dict[str, Any] | None = None
        self._step = done

    def log_step(self, metrics: StepMetrics) -> None:
        """Logs a step; `write_line` writes it to metrics.jsonl, with the cost of a checkpoint after it."""
        self.write_line()
        self._step = metrics.step
        self._line = {name: value for name, value in asdict(metrics).items() if value is not None}
        numbers = {f"train/{name}": value for name, value in self._line.items() if name != "step"}
        self._for_trackers(lambda tracker: tracker.log(numbers, step=metrics.step))
        text = f"loss {metrics.loss:.4f}, {metrics.samples_per_second:.0f} samples/s"
        self._bar.update(1)
        self._bar.set_postfix_str(text, refresh=False)
        now = time.monotonic()
        first_or_last = metrics.step in (self.done + 1, self.total)
        if self._bar.disable and (now - self._printed > _LOG_EVERY_SECONDS or first_or_last):
            self._printed = now
            seconds = (
                (now - self._started) / (metrics.step - self.done) * (self.total - metrics.step)
            )
            line = f"step {metrics.step}/{self.total}  epoch {metrics.epoch:.2f}  {text.replace(',', ' ')}"
            launch.log_on_main(self.accelerator, f"{line}  {tqdm.format_interval(seconds)} left")

    def write_line(self, extra: Mapping[str, Any] | None = None) -> None:
        """Appends the last logged step, and `extra`, to metrics.jsonl, if that is not yet done."""
        if self._line is not None:
            self.files.append("metrics.jsonl", {**self._line, **(extra or {})})
        self._line = None

    def log_evaluation(self, evaluation: Evaluation, step: int, best: bool = False) -> None:
        """Logs an evaluation of the weights after `step`, and writes its predictions."""
        self.files.append_evaluation(evaluation, step)
        self.files.write_predictions(evaluation)
        numbers = {
            f"{evaluation.split}/{name}": value for name, value in evaluation.single_numbers.items()
        }
        # W&B drops what comes at an earlier step than the last: the best model's evaluation of the test rows
        place = step if evaluation.split == "validation" else max(step, self._step)
        self._for_trackers(lambda tracker: tracker.log(numbers, step=place))
        line = f"evaluation of {evaluation.split} at step {step}: {evaluation}{'  (best so far)' * best}"
        launch.log_on_main(self.accelerator, line)

    def close(self) -> None:
        """Writes the last line and closes the trackers."""
        self.write_line()
        self._bar.close()
        # not accelerator.end_training(), which also destroys the process group: see launch.failure
        launch.close_on_failure()
        self._for_trackers(lambda tracker: tracker.finish())

    def _for_trackers(self, call: Callable[[Any], object]) -> None:
        """Calls a function for each tracker. The run continues without one that fails, as when its server is gone."""
        for tracker in list(self.accelerator.trackers):
            try:
                call(tracker)
            except Exception as error:
                self.accelerator.trackers.remove(tracker)
                why = f"{type(error).__name__}: {first_line(error)}"
                line = f"--report_to {tracker.name} failed ({why}): continuing without it"
                launch.log_on_main(self.accelerator, line, logging.WARNING)


def class_lines(evaluation: Evaluation) -> list[str]:
    """F1 of each class, the lowest first if there are many."""
    classes = evaluation.numbers.get("per_class", {})
    names = list(classes)
    if len(names) > _MAX_CLASSES:
        names = sorted(names, key=lambda name: classes[name]["f1"])[:_MAX_CLASSES]
    lines = [
        f"  F1 {classes[name]['f1']:.4f}  {name} (of {classes[name]['support']})" for name in names
    ]
    if len(names) < len(classes):
        lines.append(f"  and {len(classes) - len(names)} classes with higher F1")
    predicted = np.flatnonzero(
        np.sum(evaluation.numbers.get("confusion_matrix", np.eye(2)), axis=0)
    )
    if len(predicted) == 1:
        remedy = "train longer (--num_train_epochs), with a higher --learning_rate, or with --class_weights balanced"
        lines.append(
            f"  every row is predicted as {list(classes)[predicted[0]]}, nothing is learned yet: {remedy}"
        )
    return lines


def tracker_names(report_to: str) -> list[str]:
    """`tensorboard,wandb` -> its names. Raises UserError for an unknown or missing one."""
    if report_to == "auto":
        return ["tensorboard"] if is_installed("tensorboard") else []
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    for name in names:
        if name not in TRACKERS:
            raise UserError(
                f"--report_to {name}{did_you_mean(name, TRACKERS)}: choose {', '.join(TRACKERS)} or none"
            )
        if not is_installed(name):
            install = install_command(name) if name == "tensorboard" else f"pip install {name}"
            raise UserError(
                f"--report_to {name} needs a package: {install}, or pass --report_to none"
            )
    return names


def start_trackers(
    accelerator: Accelerator,
    settings: TrainingSettings,
    folder: Path,
    project: str,
    config: dict[str, Any],
    step: int,
) -> None:
    """Starts the trackers of `--report_to` on the main process, each in its folder within the run folder.

    `project` is the default of `--project`, `config` holds all settings; TensorBoard drops events after `step`. Raises
    UserError if one cannot start: no login, no answer from its server.
    """
    run_name, project = settings.run_name or folder.name, settings.project or project
    for name in tracker_names(settings.report_to) if accelerator.is_main_process else []:
        path = str(folder / name)
        try:
            artifacts = _mlflow_files(path) if name == "mlflow" else None
            options: dict[str, dict[str, Any]] = {
                # it has no projects, and names a run by its folder
                "tensorboard": {"run_name": settings.run_name or "", "logging_dir": path,
                                "purge_step": step + 1 if step else None},
                "wandb": {"run_name": project, "name": run_name, "dir": str(folder)},
                "mlflow": {"experiment_name": project, "run_name": run_name, "logging_dir": artifacts},
                "swanlab": {"run_name": project, "experiment_name": run_name, "logdir": path},
                "trackio": {"run_name": project, "name": run_name},
            }  # fmt: skip
            tracker = LOGGER_TYPE_TO_CLASS[name](**options[name])
            tracker.start()
            if name != "tensorboard":  # it would write them as a second, unnamed run
                tracker.store_init_configuration(config)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(
                f"--report_to {name} cannot start ({why}): fix that, or pass --report_to none"
            ) from error
        accelerator.trackers.append(tracker)
        launch.close_on_failure(partial(_mark_failed, accelerator.trackers))


def _mark_failed(trackers: Sequence[Any]) -> None:
    for tracker in trackers:
        with contextlib.suppress(Exception):  # one that fails must not keep the others open
            if tracker.name == "wandb":
                tracker.run.finish(exit_code=1)
            elif tracker.name == "mlflow":
                importlib.import_module("mlflow").end_run("FAILED")
            elif tracker.name == "swanlab":
                tracker.run.finish("crashed", "the run failed")
            else:
                tracker.finish()


def _mlflow_files(folder: str) -> str | None:
    """Points mlflow's store at the folder, unless MLFLOW_TRACKING_URI is set, and returns the URI for artifacts."""
    if "MLFLOW_TRACKING_URI" in os.environ:
        return None
    Path(folder).mkdir(exist_ok=True)
    importlib.import_module("mlflow").set_tracking_uri(
        f"sqlite:///{Path(folder).resolve()}/mlflow.db"
    )
    return Path(folder).resolve().as_uri()


class RunSummary:
    def __init__(
        self,
        accelerator: Accelerator,
        settings: Any,
        data: Data,
        schedule: Schedule,
        folder: Path,
    ) -> None:
        self.accelerator, self.settings, self.data = accelerator, settings, data
        self.schedule, self.folder = schedule, folder

    def start_lines(self, model: Any) -> list[str]:
        """Data, model, world and schedule."""
        accelerator, settings, data, schedule = (
            self.accelerator,
            self.settings,
            self.data,
            self.schedule,
        )
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
                length = (
                    2 if len(words) > place + 1 and not words[place + 1].startswith("--") else 1
                )
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
        self,
        evaluation: Evaluation,
        comparison: Evaluation | None,
        seconds: float,
        feature_lines: Sequence[str],
    ) -> list[str]:
        """The results, and the files that hold them."""
        folder, model_class = shlex.quote(str(self.folder)), architecture(self.folder / "model")
        way = (
            f"loads with {model_class}.from_pretrained"
            if model_class
            else "loads with the recipe's model only"
        )
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
        note = "any number of processes can resume from them"
        return [f"  {folder}/checkpoints/      {size}, {note}"]

    def _next_command(self) -> list[str]:
        """That of the targets, or after a demo the same launch on the user's data."""
        command = self.data.targets.next_command(self.settings, self.folder)
        from_demo = str(self.settings.data.dataset_name).startswith(demo.PREFIX)
        if command is None and from_demo and (again := self.command()):
            words, file = shlex.split(again), launch.launch_info()["config_file"]
            words = words[: words.index(sys.argv[0]) + 1] + (
                ["--config_file", file] if file else []
            )
            command = f"{shlex.join(words)} --train_file YOUR_FILE.csv --model_name_or_path bert-base-chinese"
        return ["next:", f"  {command}"] if command else []


def _missing_packages(report_to: str) -> str:
    """What the run will not write because a package is missing, and how to install it; "" if nothing is missing."""
    lacking = {} if is_installed("matplotlib") else {"report": "report.html will have no curves"}
    if report_to == "auto" and not is_installed("tensorboard"):
        lacking["tensorboard"] = "there will be no TensorBoard files"
    return f"{', '.join(lacking.values())}: {install_command(*lacking)}" if lacking else ""


def runnable_command(command: str) -> str:
    """The command, with its folder if this environment is not activated."""
    installed, on_path = Path(sys.executable).parent / command, shutil.which(command)
    if on_path and Path(on_path).resolve() == installed.resolve():
        return command
    return os.path.relpath(installed) if installed.exists() else command
