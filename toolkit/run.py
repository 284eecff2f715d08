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
from toolkit.training.optimizer import unwrapped_optimizer
from toolkit.training.resume import Resumed, identity_of, resume_from
from toolkit.training.run_folder import open_run_folder
from toolkit.training.steps import Step, StepMetrics, Steps
from toolkit.training.verified import script_digest, strategy_name, verification_note
from toolkit.utils.features import features
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
        """Raises UserError for a run in the folder that `--resume` excludes, a missing tracker, or
        a `compute_metrics` without `--metric_for_best_model`."""
        tracker_names(settings.training.report_to)  # raises before the folder is created
        self.accelerator = accelerator
        self.settings = settings
        self.data = data
        self.tokenizer = tokenizer
        self.schedule = steps.schedule
        self.recipe = recipe
        self._steps = steps
        self._compute_metrics = compute_metrics
        self.facts: dict[str, Any] = {
            "settings": flat(settings),
            "versions": versions(),
            "identity": identity_of(accelerator, settings, data, recipe),
            "script": script_digest(),
        }
        self.best = make_best(accelerator, settings.training, data, compute_metrics)
        self.folder = open_run_folder(accelerator, settings.training, recipe, self.facts)
        self.files = RunFiles(accelerator, self.folder.path)
        self.summary = RunSummary(accelerator, settings, data, self.schedule, self.folder.path)
        self.answers = Answers()
        """Converts the best model's outputs to answers."""
        if data.facts.get("labels"):
            self.answers = ClassAnswers(data.labels)
        self.stopped = False
        """Whether a stop signal ended the training, with a checkpoint."""
        self._last: tuple[int, Evaluation] | None = None
        """The last evaluation, and the step of its weights."""
        self._gathered: StepMetrics | None = None
        """Metrics of the last step, if they were gathered at it."""
        self._started = time.monotonic()

    def resume(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: AcceleratedScheduler,
        evaluate: Evaluate | None = None,
    ) -> None:
        """Loads the newest intact checkpoint of this run, if any, into these objects, and opens the
        log. `evaluate` runs if a stop signal has postponed an evaluation. Raises UserError for
        damaged or unsuitable checkpoints."""
        fault = "`run.finish(evaluate)` was not called: no results were written"
        exit_state.unfinished = f"{self.folder.path}: {fault}"
        prepared = (self.accelerator, model, optimizer, scheduler)
        path = self.folder.path
        self.checkpoints = Checkpoints(
            *prepared,
            self.tokenizer,
            self._steps,
            self.best,
            path,
            self.facts,
        )
        decay = self.settings.training.ema_decay
        self._average = None if decay is None else Average(self.checkpoints.live, decay)
        free_settings = settings_of_features(self.settings)
        resumed = resume_from(self.checkpoints, self.folder.origin, free_settings)
        self._write_config(resumed)
        done = self._steps.done
        training = self.settings.training
        settings = self.facts["settings"]
        start_trackers(self.accelerator, training, path, self.recipe, settings, done)
        self._log = RunLog(self.accelerator, self.files, self.schedule.total_steps, done)
        lines = list(resumed.lines) if resumed else []
        note = verification_note(self.accelerator)
        if note:
            lines.append(note)
        for line in [*self.summary.start_lines(model), *lines, *self.checkpoints.notes()]:
            self.say(line)
        if evaluate and resumed and resumed.state["evaluation_left"]:
            self._evaluate(evaluate, done)
            self.checkpoints.set_links()

    def say(self, line: str) -> None:
        """Prints a line, on one process."""
        launch.log_on_main(self.accelerator, line)

    def steps(self) -> Iterator[Step]:
        """Yields the remaining steps, until the last, a stop signal, or `--early_stopping_patience`
        evaluations without improvement."""
        if not hasattr(self, "checkpoints"):
            call = "`run.resume(model, optimizer, scheduler, evaluate)`"
            raise UserError(f"call {call} first, in a new run, too")
        for step in self._steps:
            if self.best.patience_exhausted:
                counter = self.best.patience_counter
                metric = self.best.metric
                self.say(f"{metric} has not improved in {counter} evaluations: stopping early")
                return
            groups = unwrapped_optimizer(self.checkpoints.optimizer).param_groups
            step.learning_rate = float(groups[0]["lr"])
            self._updates = self.checkpoints.scheduler.scheduler.last_epoch
            yield step
            if self._steps.done != step.number:
                call = "`run.after(step, grad_norm, evaluate)`"
                raise UserError(f"step {step.number}: call {call} at its end")
            if self._steps.stop_signal:
                self._stop()
                return

    def after(self, step: Step, grad_norm: Any, evaluate: Evaluate) -> None:
        """Logs an optimizer step. Evaluates the validation rows every `--eval_every` steps, and
        saves the model if it is the best so far. Saves a checkpoint every `--checkpoint_every`
        steps, and after a stop signal: then the evaluation is postponed until the run is
        resumed."""
        self.log(step, grad_norm)
        postponed = False
        if step.evaluates:
            postponed = bool(self._steps.stop_signal) or not self._evaluate(evaluate, step.number)
        if self._gathered is not None:  # a step with a checkpoint is always gathered
            self._log.write_line(self.checkpoints.save_if_due(self._gathered, postponed))

    def log(self, step: Step, grad_norm: Any) -> None:
        """Updates the average of the weights (`--ema_decay`), gathers the losses of
        `--logging_steps` steps, and logs them. Raises UserError for a loss that is not finite,
        after logging the steps before it, and unless the scheduler has been stepped with the
        optimizer."""
        updated = not self.checkpoints.optimizer.step_was_skipped
        if updated:
            steps = self.checkpoints.scheduler.scheduler.last_epoch - self._updates
            self._steps.checks.check_update(steps)
        if self._average and updated:
            self._average.update(self.checkpoints.scheduler.scheduler.last_epoch)
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
        model = self.checkpoints.model
        with contextlib.ExitStack() as stack:
            if self._average:
                stack.enter_context(average_as_weights(self.checkpoints.live))
            try:
                evaluation = evaluate(self.data.validation)
            except StopRequested as stop:
                self._steps.stop_signal = stop.number
                return False
            improved = self.best.update(evaluation, step)
            if improved:
                with explain_write_errors(self.folder.model):
                    dtype = self.settings.training.save_dtype
                    folder = self.folder.model
                    save_model(self.accelerator, model, self.tokenizer, folder, step, dtype)
        self._last = step, evaluation
        self._log.log_evaluation(evaluation, step, improved)
        return True

    def _stop(self) -> None:
        self._close()
        self.stopped = True
        launch.set_exit_signal(self._steps.stop_signal)
        name = signal.Signals(self._steps.stop_signal).name
        done = self._steps.done
        command = self.summary.command_to_continue()
        launch.log_on_main(
            self.accelerator,
            f"stopped by {name} after step {done} of {self.schedule.total_steps}, checkpoint in "
            f"{self.folder.path / 'checkpoints' / 'last'}; to continue: {command}",
            logging.WARNING,  # shown with --log_level warning, too
        )
        try:
            self.files.mark_stopped(signal=name, step=done, command=command)
            if self.accelerator.is_main_process:
                self.summary.write_pages(self.best.step)
        except (OSError, ValueError, UserError) as error:
            # the checkpoint is saved: only the page failed
            self.say(f"no report of the stopped run: {first_line(error)}")

    def _close(self) -> None:
        exit_state.unfinished = ""
        self.checkpoints.wait()
        self._log.close()

    def best_evaluation(self, split: Split, evaluate: Evaluate) -> Evaluation:
        """Evaluates a split with the best model, which must be loaded, unless that was the last
        evaluation."""
        if self._last:
            step, evaluation = self._last
            if step == self.best.step and evaluation.split == split.name:
                return evaluation
        self._last = self.best.step, evaluate(split)
        return self._last[1]

    def finish(self, evaluate: Evaluate) -> None:
        """Evaluates the best model on the test rows, or else the validation rows, writes the model
        card and report.html, and prints the results and their paths. Does nothing after a stop
        signal: run the same command to resume."""
        if self.stopped:
            return
        self._finish_training(evaluate)
        logged = self._last[1] if self._last else None
        if self.best.step != self._steps.done or self._average:
            load_weights(self.accelerator, self.checkpoints.model, self.folder.model)
        for feature in features():
            feature.best_model(self, evaluate)
        split = self.data.test or self.data.validation
        comparison = self._compare_truncated(split, evaluate)
        outputs = self.best_evaluation(split, evaluate)
        evaluation = self.answers.evaluation(outputs, self._compute_metrics)
        if evaluation is not logged:
            self._log.log_evaluation(evaluation, self.best.step)
        self._close()
        results = (self.folder.path, self.settings, self.data, evaluation, self.answers)
        lines = [line for feature in features() for line in feature.results(*results)]
        if self.accelerator.is_main_process:
            self._print_results(evaluation, comparison, lines)

    def _finish_training(self, evaluate: Evaluate) -> None:
        """Also where the recipe has left the loop: evaluates its last weights, and saves them."""
        self._log_steps(self._steps.flush())
        evaluated_step = self.best.step
        if self._last:
            evaluated_step, _ = self._last
        is_behind = self._gathered is not None and evaluated_step != self._steps.done
        if is_behind or not self.best.step:
            self._evaluate(evaluate, self._steps.done)
            if self._gathered:
                self.checkpoints.save_if_due(self._gathered, last=True)

    def _compare_truncated(self, split: Split, evaluate: Evaluate) -> Evaluation | None:
        """The best model on the same texts, truncated to `--compare_max_length`, if set."""
        length = section_in(self.settings, LongTextSettings).compare_max_length
        if not length:
            return None
        truncated = split.truncate(self.tokenizer, length, name=f"{split.name}_first_{length}")
        comparison = self.answers.evaluation(evaluate(truncated), self._compute_metrics)
        self.files.append_evaluation(comparison, self.best.step, max_length=length)
        return comparison

    def _print_results(
        self,
        evaluation: Evaluation,
        comparison: Evaluation | None,
        lines: list[str],
    ) -> None:
        """Writes the pages, and prints the results with any --log_level."""
        self.summary.write_pages(self.best.step)
        seconds = time.monotonic() - self._started
        lines = [*self.answers.describe(evaluation), *lines]
        print("\n".join(self.summary.end_lines(evaluation, comparison, seconds, lines)), flush=True)

    def _write_config(self, resumed: Resumed | None) -> None:
        data = self.data
        self.files.truncate_to_checkpoint(resumed.state if resumed and resumed.same_run else None)
        facts = {
            "samples": data.sizes,
            **data.facts,
            **data.targets.source(),
            "text_column": data.text_column,
            "max_length": data.max_length,
            "digest": data.digest,
            "file_digests": data.file_digests,
            "notes": data.notes,
            **asdict(self.schedule),
            "metric_for_best_model": self.best.metric,
            "pipeline_tag": data.targets.pipeline_tag,
        }
        extra_fields = {
            "identity": self.facts["identity"],
            "strategy": strategy_name(self.accelerator),
            "model_class": type(unwrapped(self.checkpoints.model)).__name__,
            "optimizer": type(unwrapped_optimizer(self.checkpoints.optimizer)).__name__,
            "resumed_from": str(resumed.folder) if resumed else None,
        }
        self.files.write_config(self.settings, facts, extra_fields)
