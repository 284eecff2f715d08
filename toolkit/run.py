"""`Run`: what a recipe calls. From settings to processes, data, a prepared model, steps that are
logged, evaluated and saved, and the results."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler

from toolkit import launch
from toolkit.checkpoint.model_folder import load_weights, save_model
from toolkit.config import (
    LongTextSettings,
    PretrainedSettings,
    flat,
    section_in,
    settings_after_training,
    tasks,
)
from toolkit.data.batches import collator_of
from toolkit.data.encode import truncate_split
from toolkit.data.options import remembered_settings
from toolkit.data.prepare import Data, finish_data, prepare_data
from toolkit.data.tokenizer import load_tokenizer
from toolkit.data.tokens import Split
from toolkit.evaluation import Best, Evaluation, Outputs
from toolkit.evaluation.answers import Answers, ClassAnswers
from toolkit.evaluation.outputs import BatchSizes
from toolkit.evaluation.saved_model import COLUMNS
from toolkit.evaluation.self_test import check_folder
from toolkit.launch.signals import StopRequested
from toolkit.pretrained import load_config
from toolkit.report.files import RunFiles
from toolkit.report.log import RunLog, start_trackers, tracker_names
from toolkit.report.summary import (
    command_to_continue,
    start_lines,
    write_config,
    write_pages,
    write_results,
)
from toolkit.training.average import Average, average_as_weights
from toolkit.training.batch_size import fit_batch_size
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.checks import TOKENS, check_tokenizer
from toolkit.training.extra_state import registered_content
from toolkit.training.metrics import StepMetrics
from toolkit.training.optimizer import make_scheduler, updates_done
from toolkit.training.prepare import prepare_for_strategy
from toolkit.training.resume import Resumed, identity_of, resume_from
from toolkit.training.run_folder import RunFolder, open_run_folder
from toolkit.training.schedule import Schedule, make_schedule, max_micro_batches
from toolkit.training.steps import Step, Steps
from toolkit.training.verified import script_digest, verification_note
from toolkit.utils.features import features
from toolkit.utils.files import explain_write_errors
from toolkit.utils.language import Language
from toolkit.utils.log import log_on_rank_0, set_language
from toolkit.utils.versions import versions

Evaluate = Callable[[Split], Evaluation]


class Run:
    """One run of a recipe, in order: `load_data`, `prepare`, `steps`, `finish`. Every process calls
    every method."""

    data: Data
    """Set by `load_data`; a recipe may replace it before `prepare`."""
    tokenizer: Any
    folder: RunFolder
    best: Best
    checkpoints: Checkpoints
    answers: Answers
    """Converts the best model's outputs to answers."""

    def __init__(self, settings: Any) -> None:
        """Forms the process group of this launch, in the precision of the settings. Raises
        UserError for a world that is not the one asked for, and a missing tracker."""
        tracker_names(settings.training.report_to)
        set_language(Language(settings.training.language))
        self.settings = settings
        self.recipe = _task_of(settings)
        self.accelerator = launch.make_accelerator(settings.training.mixed_precision)
        self.stopped = False
        """Whether a stop signal ended the training, with a checkpoint."""
        self._is_trial = False
        self._step: Step | None = None
        """The step that the recipe computes."""
        self._last: tuple[int, Evaluation] | None = None
        """The last evaluation, and the step of its weights."""
        self._gathered: StepMetrics | None = None
        """Metrics of the last step, if they were gathered at it."""
        self._started = time.monotonic()

    def load_data(self, model: PretrainedSettings | None = None) -> Data:
        """Reads and tokenizes the files, once per machine. `model`: the settings of the tokenizer's
        model, by default `settings.model`. Raises UserError for every fault of the files."""
        settings, accelerator = self.settings, self.accelerator
        model = model or settings.model
        config = load_config(model)  # first: it explains what is wrong with a folder
        if accelerator.is_local_main_process:
            check_folder(str(model.model_name_or_path), model.self_test)
        self.tokenizer = load_tokenizer(model)
        data = prepare_data(settings, self.tokenizer, config, accelerator)
        self.data = finish_data(settings, data, self.tokenizer, accelerator)
        # saved with the model: to truncate texts, and to find their columns, as here
        self.tokenizer.model_max_length = data.max_length
        self.tokenizer.init_kwargs[COLUMNS] = _training_columns(settings, data)
        setattr(self.tokenizer, TOKENS, len(self.tokenizer))
        return self.data

    @property
    def schedule(self) -> Schedule:
        """The run's optimizer steps, known after `load_data`."""
        return make_schedule(self.settings.training, self.data.train)

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
    ) -> tuple[Any, Any, AcceleratedScheduler]:
        """(model, optimizer, scheduler): copied to every process, or sharded, as the config file
        says, with rank 0's weights.

        `scheduler`: a scheduler of torch for this optimizer, in place of `--lr_scheduler_type`;
        `run.schedule` has the number of steps. Raises UserError for settings, a model or an
        optimizer that the strategy cannot train."""
        accelerator, train = self.accelerator, self.data.train
        check_tokenizer(self.tokenizer)
        training = self._fit_to_device(model)
        accumulation = max_micro_batches(training, train, accelerator.num_processes)
        model, optimizer = prepare_for_strategy(
            accelerator, training, accumulation, model, optimizer
        )
        schedule = self.schedule
        scheduler = make_scheduler(optimizer, training, schedule.total_steps, scheduler)
        objects = (schedule, model, optimizer, scheduler)
        self._steps = Steps(accelerator, train, self.tokenizer, training, *objects)
        return model, optimizer, scheduler

    def _fit_to_device(self, model: torch.nn.Module) -> Any:
        """The settings of training, with the number of samples and tokens of a micro-batch; adapts
        the model to the batches."""
        accelerator, train = self.accelerator, self.data.train
        collate = collator_of(train, self.tokenizer, accelerator.device)
        collate.prepare_model(accelerator, model)
        for feature in features():
            feature.model(self, model)
        training = self.settings.training
        training = training.limit_tokens(accelerator.device.type, int(train.lengths.max()))
        return fit_batch_size(accelerator, model, collate, training)

    def outputs(self, split: Split) -> Outputs:
        """Collects the outputs for a split, each sample once."""
        training = self._steps.settings
        per_device = training.per_device_eval_batch_size or 2 * training.micro_batch_size
        sizes = BatchSizes(per_device, training.max_tokens_per_batch)
        return Outputs(
            self.accelerator,
            split,
            self.tokenizer,
            sizes,
            self._class_answers(),
            self._is_trial,
        )

    def _class_answers(self) -> ClassAnswers | None:
        """None where the data have no classes or numbers to predict."""
        has_labels = self.data.facts.get("labels")
        return ClassAnswers(self.data.labels) if has_labels else None

    def say(self, line: str) -> None:
        """Prints a line, on one process."""
        log_on_rank_0(line)

    def steps(self, evaluate: Evaluate) -> Iterator[Step]:
        """Yields the remaining steps, until the last, a stop signal, or
        `--early_stopping_patience` evaluations without improvement.

        Before the first one it calls `evaluate` on a few rows, to find mistakes early, and resumes
        the newest checkpoint of this run, if any. After each step it logs; every `--eval_every`
        steps it evaluates the validation rows, and saves the model if it is the best so far; every
        `--checkpoint_every` steps, and after a stop signal, it saves a checkpoint."""
        self._begin(evaluate)
        for step in self._steps:
            if self.best.patience_exhausted:  # here: a resumed run may begin with it
                metric, count = self.best.metric, self.best.patience_counter
                self.say(
                    f"{metric} has not improved in {count} evaluations: stopping early"
                )
                return
            self._step = step
            yield step
            self._end_step(step, evaluate)
            if self._steps.stop_signal:
                self._stop()
                return

    def _begin(self, evaluate: Evaluate) -> None:
        training = self.settings.training
        self.best = Best(
            training.metric_for_best_model or self.data.targets.usual_metric,
            training.early_stopping_patience,
            training.greater_is_better,
        )
        self.answers = self._class_answers() or Answers()
        # mistakes of the recipe leave no folder behind
        self._try_evaluation(evaluate)
        registered_content(self.accelerator)
        self._open_folder()
        decay = training.ema_decay
        self._average = None if decay is None else Average(self.checkpoints.live(), decay)
        untrained = settings_after_training(self.settings)
        resumed = resume_from(self.checkpoints, self.folder.origin, untrained)
        self._open_logs(resumed)
        if resumed and resumed.state["evaluation_left"]:
            self._evaluate(evaluate, self._steps.done)
            self.checkpoints.set_links()

    def _try_evaluation(self, evaluate: Evaluate) -> None:
        """Raises what `evaluate` raises, and UserError if it lacks `--metric_for_best_model`."""
        self._is_trial = True
        try:
            evaluation = evaluate(self.data.validation)
        finally:
            self._is_trial = False
        self.best.check(evaluation.numbers)

    def _open_folder(self) -> None:
        self.provenance: dict[str, Any] = {
            "settings": flat(self.settings),
            "versions": versions(),
            "identity": identity_of(
                self.accelerator, self.settings, self.data, self.recipe
            ),
            "script": script_digest(),
        }
        self.folder = open_run_folder(
            self.accelerator, self.settings.training, self.recipe, self.provenance
        )
        self.checkpoints = Checkpoints(
            self._steps, self.tokenizer, self.best, self.folder.path, self.provenance
        )

    def _open_logs(self, resumed: Resumed | None) -> None:
        """After those of the checkpoint, if it is this run's own."""
        accelerator, path, done = self.accelerator, self.folder.path, self._steps.done
        self.files = RunFiles(accelerator, path)
        own = resumed if self.checkpoints.continues else None
        self.files.truncate_to_checkpoint(own.state if own else None)
        write_config(self, resumed)
        start_trackers(
            accelerator,
            self.settings.training,
            path,
            self.recipe,
            self.provenance["settings"],
            done,
        )
        self._log = RunLog(accelerator, self.files, self.schedule.total_steps, done)
        lines = [
            *start_lines(self, self._steps.model),
            *(resumed.lines if resumed else []),
            verification_note(self.accelerator),
        ]
        for line in lines:
            if line:
                self.say(line)

    def _end_step(self, step: Step, evaluate: Evaluate) -> None:
        """Raises UserError for a loss that is not finite, after logging the steps before it."""
        self._step = None
        steps = self._steps
        if self._average and not steps.optimizer.step_was_skipped:
            self._average.update(updates_done(steps.scheduler))
        self._gathered = None
        self._log_steps(steps.finish(step))
        is_left = False
        if step.evaluates:
            is_left = bool(steps.stop_signal) or not self._evaluate(evaluate, step.number)
        if self._gathered is not None:  # a step with a checkpoint is always gathered
            self.checkpoints.save_if_due(self._gathered, evaluation_left=is_left)

    def _log_steps(self, finished: Iterator[StepMetrics]) -> None:
        for metrics in finished:
            self._log.log_step(metrics)
            self._gathered = metrics
            if metrics.step == 1:
                targets = self.data.targets
                note = targets.first_loss_note(self.settings, self.tokenizer, metrics.loss)
                if note:
                    self.say(note)

    def _evaluate(self, evaluate: Evaluate, step: int) -> bool:
        """Evaluates the validation rows, of `--ema_decay` with the average, and saves the model if
        it is the best so far. Returns False if a stop signal interrupted it."""
        weights: Any = contextlib.nullcontext()
        if self._average is not None:
            weights = average_as_weights(self.checkpoints.live)
        with weights:
            try:
                evaluation = evaluate(self.data.validation)
            except StopRequested as stop:
                self._steps.stop_signal = stop.args[0]
                return False
            is_best = self.best.update(evaluation, step)
            if is_best:
                folder, dtype = self.folder.model, self.settings.training.save_dtype
                objects = self.accelerator, self._steps.model, self.tokenizer
                with explain_write_errors(folder):
                    save_model(*objects, folder, step, dtype)
        self._last = step, evaluation
        self._log.log_evaluation(evaluation, step, is_best)
        return True

    def _stop(self) -> None:
        self._close()
        self.stopped = True
        number, done = self._steps.stop_signal, self._steps.done
        launch.exit_state.exit_code = 128 + number
        name = signal.Signals(number).name
        command = command_to_continue(self)
        where = f"checkpoint in {self.folder.path / 'checkpoints' / 'last'}"
        line = (
            f"stopped by {name} after step {done} of {self.schedule.total_steps}, {where}"
        )
        # shown with --log_level warning, too
        log_on_rank_0(f"{line}; to continue: {command}", logging.WARNING)
        self.files.mark_stopped(signal=name, step=done, command=command)
        if self.accelerator.is_main_process:
            write_pages(self.folder.path, self.best.step)

    def _close(self) -> None:
        self.checkpoints.wait()
        self._log.close_trackers()

    def finish(self, evaluate: Evaluate) -> None:
        """Evaluates the best model on the test rows, or else the validation rows, writes the model
        card and report.html, and prints the results and their paths. Does nothing after a stop
        signal: run the same command to resume."""
        if self.stopped:
            return
        self._end_training(evaluate)
        logged = self._last[1] if self._last else None
        if self.best.step != self._steps.done or self._average:
            load_weights(self.accelerator, self._steps.model, self.folder.model)
        for feature in features():
            feature.best_model(self, evaluate)
        evaluation = self._evaluate_best_model(evaluate)
        if evaluation is not logged:
            self._log.log_evaluation(evaluation, self.best.step)
        self._close()
        write_results(self, evaluation, time.monotonic() - self._started)

    def _end_training(self, evaluate: Evaluate) -> None:
        """Evaluates and saves the last weights unless they have been:

        - the loop has ended, or the recipe left it between two steps: the steps since the last
          gather are logged;
        - the recipe left it within a step, after the update (`grad_norm` is set): the step counts;
          before it: it does not;
        - a finished run was resumed: nothing is new, unless it has no best model."""
        if self._step is not None and self._step.grad_norm is not None:
            self._end_step(self._step, evaluate)
        self._log_steps(self._steps.flush())
        done = self._steps.done
        evaluated = self._last[0] if self._last else self.best.step
        is_behind = self._gathered is not None and evaluated != done
        if is_behind or not self.best.step:
            self._evaluate(evaluate, done)
            if self._gathered:
                self.checkpoints.save_if_due(self._gathered, last=True)

    def _evaluate_best_model(self, evaluate: Evaluate) -> Evaluation:
        """On the test rows, or else the validation rows, and first on the same texts truncated to
        `--compare_max_length`."""
        split = self.data.test or self.data.validation
        length = section_in(self.settings, LongTextSettings).compare_max_length
        if length:
            short = truncate_split(
                split, self.tokenizer, length, f"{split.name}_first_{length}"
            )
            truncated = self._answered(evaluate(short))
            self.files.append_evaluation(truncated, self.best.step, max_length=length)
            self.say(f"the saved model reading the first {length} tokens only: {truncated}")
        return self._answered(self.best_evaluation(split, evaluate))

    def _answered(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation of the answers that a feature makes of the model's outputs."""
        if evaluation.compute_metrics is None:
            return evaluation
        return self.answers.evaluation(evaluation, evaluation.compute_metrics)

    def best_evaluation(self, split: Split, evaluate: Evaluate) -> Evaluation:
        """Evaluates a split with the best model, which must be loaded, unless that was the last
        evaluation."""
        if self._last:
            step, evaluation = self._last
            if step == self.best.step and evaluation.split == split.name:
                return evaluation
        self._last = self.best.step, evaluate(split)
        return self._last[1]


def _task_of(settings: Any) -> str:
    """cls, bigbird, title, ...: whose class these settings have, or one derived from it."""
    # those that derive from others last
    for name, settings_class in reversed(tasks().items()):
        if isinstance(settings, settings_class):
            return name
    return type(settings).__name__.lower()


def _training_columns(settings: Any, data: Data) -> dict[str, Any]:
    return {
        "text_column": data.text_column,
        "text_pair": data.text_pair,
        **data.targets.source(),
        **remembered_settings(settings.data),
    }
