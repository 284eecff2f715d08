"""`Run`, the interface of a recipe to its run: resume, log, evaluate, save, finish."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler

from toolkit import launch
from toolkit.checkpoint.model_folder import load_weights, save_model
from toolkit.config import LongTextSettings, flat, section_in, settings_of_features
from toolkit.data.prepare import Prepared
from toolkit.data.tokens import Split
from toolkit.errors import UserError, first_line
from toolkit.evaluation import ComputeMetrics, Evaluation
from toolkit.evaluation.answers import Answers, ClassAnswers
from toolkit.evaluation.best import make_best
from toolkit.launch.exit_state import exit_state
from toolkit.launch.signals import StopRequested
from toolkit.report.files import RunFiles
from toolkit.report.log import RunLog, RunSummary, start_trackers, tracker_names
from toolkit.training.average import Average, average_as_weights
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.checks import OWN_SCHEDULE, check_scheduler, refuse_compiled
from toolkit.training.optimizer import unwrapped_optimizer
from toolkit.training.resume import Resumed, identity_of, resume_from, script_digest
from toolkit.training.run_folder import open_run_folder
from toolkit.training.steps import Step, StepMetrics, Steps
from toolkit.utils.features import features, hooks, write_results
from toolkit.utils.files import explain_write_errors
from toolkit.utils.modules import unwrapped
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
        """Raises UserError for a run in the folder that `--resume` excludes, a missing tracker, a feature's setting
        that does not fit the data, or a `compute_metrics` without `--metric_for_best_model`."""
        user_settings = settings
        for run_settings in hooks("run_settings", settings):
            settings = run_settings(settings, data, accelerator)
        self.accelerator, self.settings, self.data, self.tokenizer = accelerator, settings, data, tokenizer
        self._steps, self.schedule, self.recipe = steps, steps.schedule, recipe
        self._compute_metrics = compute_metrics
        tracker_names(settings.training.report_to)  # raises for a missing package before it creates the folder
        identity = identity_of(accelerator, settings, data, recipe)
        self.facts: dict[str, Any] = {
            "settings": flat(settings), "versions": versions(), "identity": identity, "script": script_digest(),
        }  # fmt: skip
        self.best = make_best(accelerator, settings.training, data, compute_metrics)
        self.folder = open_run_folder(accelerator, settings.training, recipe, self.facts)
        self.files = RunFiles(accelerator, self.folder.path)
        self.summary = RunSummary(accelerator, user_settings, data, self.schedule, self.folder.path)
        self.answers: Answers = ClassAnswers(data.labels) if data.facts.get("labels") else Answers()
        """Converts the best model's outputs to answers."""
        self.stopped = False
        """Whether a stop signal ended the training, with a checkpoint."""
        self._last: tuple[int, Evaluation] | None = None
        """The last evaluation, and the step of its weights."""
        self._gathered: StepMetrics | None = None
        """Metrics of the last step, if they were gathered at it."""
        self._started = time.monotonic()

    def resume(
        self, model: torch.nn.Module, optimizer: Any, scheduler: AcceleratedScheduler, evaluate: Evaluate | None = None
    ) -> None:
        """Loads the newest intact checkpoint of this run, if any, into these objects, and opens the log. `evaluate`
        runs if a stop signal has postponed an evaluation. Raises UserError for damaged or unsuitable checkpoints,
        for an optimizer or scheduler that is not prepared, and for a compiled model."""
        exit_state.unfinished = f"{self.folder.path}: `run.finish(evaluate)` was not called: no results were written"
        refuse_compiled(model)
        check_scheduler(self.accelerator, optimizer, scheduler, self.settings.training)
        prepared = (self.accelerator, model, optimizer, scheduler)
        self.checkpoints = Checkpoints(*prepared, self.tokenizer, self._steps, self.best, self.folder.path, self.facts)
        self._steps.checks.watch_optimizer(optimizer)
        decay = self.settings.training.ema_decay
        self._average = None if decay is None else Average(self.checkpoints.live, decay)
        resumed = resume_from(self.checkpoints, self.folder.origin, settings_of_features(self.settings))
        if resumed:
            self._steps.checks.remember_weights(model)
        self._write_config(resumed)
        done, settings = self._steps.done, self.facts["settings"]
        start_trackers(self.accelerator, self.settings.training, self.folder.path, self.recipe, settings, done)
        self._log = RunLog(self.accelerator, self.files, self.schedule.total_steps, done)
        lines = resumed.lines if resumed else []
        for line in [*self.summary.start_lines(model), *lines, *self.checkpoints.notes()]:
            self.say(line)
        if evaluate and resumed and resumed.state["evaluation_left"]:
            self._evaluate(evaluate, done)
            self.checkpoints.set_links()

    def say(self, line: str) -> None:
        """Prints a line, on one process."""
        launch.log_on_main(self.accelerator, line)

    def steps(self) -> Iterator[Step]:
        """Yields the remaining steps, until the last, a stop signal, or `--early_stopping_patience` evaluations without
        improvement."""
        if not hasattr(self, "checkpoints"):
            raise UserError("call `run.resume(model, optimizer, scheduler, evaluate)` first, in a new run, too")
        for step in self._steps:
            if self.best.patience_exhausted:
                counter = self.best.patience_counter
                self.say(f"{self.best.metric} has not improved in {counter} evaluations: stopping early")
                return
            step.learning_rate = float(unwrapped_optimizer(self.checkpoints.optimizer).param_groups[0]["lr"])
            self._scheduled = self.checkpoints.scheduler.scheduler.last_epoch
            yield step
            if self._steps.done != step.number:
                raise UserError(f"step {step.number}: call `run.after(step, grad_norm, evaluate)` at its end")
            if self._steps.stop_signal:
                self._stop()
                return

    def after(self, step: Step, grad_norm: Any, evaluate: Evaluate) -> None:
        """Logs an optimizer step. Evaluates the validation rows every `--eval_every` steps, and saves the model if it
        is the best so far. Saves a checkpoint every `--checkpoint_every` steps, and after a stop signal: then the
        evaluation is postponed until the run is resumed."""
        self.log(step, grad_norm)
        postponed = False
        if step.evaluates:
            postponed = bool(self._steps.stop_signal) or not self._evaluate(evaluate, step.number)
        if self._gathered is not None:  # a step with a checkpoint is always gathered
            self._log.write_line(self.checkpoints.save_if_due(self._gathered, postponed))
        self._steps.checks.watch_weights(self.checkpoints.model)

    def log(self, step: Step, grad_norm: Any) -> None:
        """Updates the average of the weights (`--ema_decay`), gathers the losses of `--logging_steps` steps, and logs
        them. Raises UserError for a loss that is not finite, after logging the steps before it, and unless the
        scheduler has been stepped with the optimizer."""
        updates = self.checkpoints.scheduler.scheduler.last_epoch
        updated = not self.checkpoints.optimizer.step_was_skipped
        if (count := updates - self._scheduled) != updated and self.accelerator.sync_gradients:
            raise UserError(
                f"step {step.number}: call `scheduler.step()` once in each step, after `optimizer.step()`; it "
                f"was stepped {count} times (a constant rate: --lr_scheduler_type constant; others: {OWN_SCHEDULE})"
            )
        if updated and not self._steps.checks.stepped and self.accelerator.sync_gradients:
            raise UserError(f"step {step.number}: the weights were not updated: call `optimizer.step()` in each step")
        if self._average and updated:
            self._average.update(updates)
        self._gathered = None
        self._log_steps(self._steps.finish(step, grad_norm))

    def _log_steps(self, finished: Iterator[StepMetrics]) -> None:
        try:
            for metrics in finished:
                self._log.log_step(metrics)
                self._gathered = metrics
        except UserError:
            self._log.write_line()
            raise

    def _evaluate(self, evaluate: Evaluate, step: int) -> bool:
        """Returns False if a stop signal interrupted it."""
        with average_as_weights(self.checkpoints.live) if self._average else contextlib.nullcontext():
            model, checks = self.checkpoints.model, self._steps.checks
            try:
                with unwrapped(model).register_forward_pre_hook(checks.refuse_wrong_evaluation, prepend=True):
                    evaluation = evaluate(self.data.validation)
            except StopRequested as stop:
                self._steps.stop_signal = stop.number
                return False
            improved = self.best.update(evaluation, step)
            if improved:
                with explain_write_errors(self.folder.model):
                    dtype = self.settings.training.save_dtype
                    save_model(self.accelerator, model, self.tokenizer, self.folder.model, step, dtype)
        self._last = step, evaluation
        self._log.log_evaluation(evaluation, step, improved)
        return True

    def _stop(self) -> None:
        self._close()
        self.stopped = True
        launch.set_exit_signal(self._steps.stop_signal)
        name, done = signal.Signals(self._steps.stop_signal).name, self._steps.done
        command = self.summary.command_to_continue()
        launch.log_on_main(
            self.accelerator,
            f"stopped by {name} after step {done} of {self.schedule.total_steps}, with a checkpoint in "
            f"{self.folder.path / 'checkpoints' / 'last'}; to continue: {command}",
            logging.WARNING,  # shown with --log_level warning, too
        )
        try:
            self.files.mark_stopped(signal=name, step=done, command=command)
            if self.accelerator.is_main_process:
                self.summary.write_pages(self.best.step)
        except (OSError, ValueError, UserError) as error:  # the checkpoint is saved: only the page failed
            self.say(f"no report of the stopped run: {first_line(error)}")

    def _close(self) -> None:
        exit_state.unfinished = ""
        self.checkpoints.wait()
        self._log.close()

    def best_evaluation(self, split: Split, evaluate: Evaluate) -> Evaluation:
        """Evaluates a split with the best model, which must be loaded, unless that was the last evaluation."""
        if self._last is None or (self._last[0], self._last[1].split) != (self.best.step, split.name):
            self._last = self.best.step, evaluate(split)
        return self._last[1]

    def finish(self, evaluate: Evaluate) -> None:
        """Evaluates the best model on the test rows, or else the validation rows, writes the model card and
        report.html, and prints the results and their paths. Does nothing after a stop signal: run the same command to
        resume."""
        if self.stopped:
            return
        self._log_steps(self._steps.flush())
        evaluated = self._last[0] if self._last else self.best.step
        if not self.best.step or (self._gathered and evaluated != self._steps.done):  # the recipe has left the loop
            self._evaluate(evaluate, self._steps.done)
            if self._gathered:
                self.checkpoints.save_if_due(self._gathered, last=True)
        logged = self._last[1] if self._last else None
        if self.best.step != self._steps.done or self.settings.training.ema_decay is not None:
            load_weights(self.accelerator, self.checkpoints.model, self.folder.model)
        for feature in features():
            feature.best_model(self, evaluate)
        final, comparison = self.data.test or self.data.validation, None
        if length := section_in(self.settings, LongTextSettings).compare_max_length:
            cut = evaluate(final.truncate(self.tokenizer, length, name=f"{final.name}_first_{length}"))
            comparison = self.answers.evaluation(cut, self._compute_metrics)
            self.files.append_evaluation(comparison, self.best.step, max_length=length)
        evaluation = self.answers.evaluation(self.best_evaluation(final, evaluate), self._compute_metrics)
        if evaluation is not logged:
            self._log.log_evaluation(evaluation, self.best.step)
        self._close()
        lines = write_results(self.folder.path, self.settings, self.data, evaluation, self.answers)
        if self.accelerator.is_main_process:
            self.summary.write_pages(self.best.step)
            seconds = time.monotonic() - self._started
            lines = [*self.answers.describe(evaluation), *lines]
            # printed with any --log_level
            print("\n".join(self.summary.end_lines(evaluation, comparison, seconds, lines)), flush=True)
            for finished in hooks("finished", self.settings):
                for line in finished(self.folder.path, self.settings):
                    print(line, flush=True)

    def _write_config(self, resumed: Resumed | None) -> None:
        data = self.data
        self.files.truncate_to_checkpoint(resumed.state if resumed and resumed.same_run else None)
        facts = {
            "samples": data.sizes, **data.facts, **data.targets.source(), "text_column": data.text_column,
            "max_length": data.max_length,
            "digest": data.digest, "file_digests": data.file_digests, "notes": data.notes, **asdict(self.schedule),
            "metric_for_best_model": self.best.metric,
        }  # fmt: skip
        extra_fields = {
            "identity": self.facts["identity"],
            "model_class": type(unwrapped(self.checkpoints.model)).__name__,
            "optimizer": type(unwrapped_optimizer(self.checkpoints.optimizer)).__name__,
            "resumed_from": str(resumed.folder) if resumed else None,
        }
        self.files.write_config(self.settings, facts, extra_fields)
