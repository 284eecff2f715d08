"""Optimizer steps: their micro-batches, and the normalisation of the loss (`Step.mean`).
`toolkit.data.batches` chooses the samples."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from toolkit import launch
from toolkit.checkpoint.parameters import floating_buffers
from toolkit.config import TrainingSettings
from toolkit.data.batches import (
    Batch,
    Collator,
    Prefetcher,
    collate_padded,
    collator_of,
    epoch_order,
    micro_batches,
)
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.launch.signals import StopSignals
from toolkit.training.checks import LoopChecks
from toolkit.training.extra_state import set_random_states
from toolkit.training.metrics import (
    StepMetrics,
    mean_by_name,
    norm_of,
    peak_memory_bytes,
)
from toolkit.training.optimizer import unwrapped_optimizer, updates_done
from toolkit.training.schedule import Schedule
from toolkit.utils import memory
from toolkit.utils.modules import unwrapped

# How often metrics and stop signals are gathered on a GPU if --logging_steps is not set
_GATHER_SECONDS = 1.0
# Each step that fp16 skips halves the loss scale: 16 in a row take it from 2**16 to 1
_MAX_SKIPPED = 15
# The name of the losses beside those that a recipe logs
_LOSS = "step.mean"


@dataclass(slots=True)
class Step:
    """One optimizer step on a global batch. A recipe sets `grad_norm`, and no other attribute."""

    loop: Steps
    number: int
    """Counted from 1."""
    indices: np.ndarray
    """Samples of the global batch."""
    collations: list[partial[Batch]]
    """Calls that make this process's micro-batches."""
    loss_denominator: float
    """Divides the sum of the global batch's losses: its samples, the sum of their weights, or its
    target tokens."""
    grad_norm: Any = None
    """What `accelerator.clip_grad_norm_` returned: the recipe sets it."""
    next_step: Step | None = None
    learning_rate: float = math.nan
    started: float = 0.0
    seconds: float = math.nan
    _batch: Batch | None = None
    _values: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """`_LOSS` and each name of `log` -> weighted values (B,) of each micro-batch."""
    _ids: list[torch.Tensor] = field(default_factory=list)

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is due after this step: every `eval_every`, and after the last."""
        schedule = self.loop.schedule
        return self.number % schedule.eval_every == 0 or self.number == schedule.total_steps

    @property
    def tokens(self) -> int:
        """Tokens of the global batch, without padding."""
        return int(self.loop.train.lengths[self.indices].sum())

    def micro_batches(self, model: torch.nn.Module) -> Iterator[Batch]:
        """Yields this process's micro-batches, with the model in training mode. Its gradients are
        synchronised in the last one, or in each with `sync_each_batch`."""
        loop, accelerator = self.loop, self.loop.accelerator
        model.train()
        loop.checks.begin_step(self.number, model)
        self._values.clear()
        self._ids.clear()
        following = self.next_step.collations[0] if self.next_step else None
        batches = loop.prefetcher.batches(self.collations, following)
        for number, batch in enumerate(batches, 1):
            self._batch = batch
            launch.exit_state.explain = partial(memory.explain, batch, loop.recomputes)
            # as `accelerator.accumulate` sets it; `ReduceOnce` reads it
            accelerator.sync_gradients = number == len(self.collations)
            with contextlib.ExitStack() as stack:
                if not (accelerator.sync_gradients or loop.syncs_each_batch):
                    stack.enter_context(accelerator.no_sync(model))
                yield batch
        self._batch = None
        launch.exit_state.explain = memory.explain_without_batch  # in the optimizer's step

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """(B,) losses of the current micro-batch -> its share, a scalar, of the mean over the
        global batch.

        Pass it to `accelerator.backward`. Where a sample's loss is a sum over tokens, the mean is
        over all tokens. Data parallel training averages gradients over processes, and accelerate
        (or DeepSpeed) over the declared accumulation: the factor cancels both, which leaves the
        division by the global loss denominator.

        Raises UserError outside `micro_batches`, and unless there is one loss per sample."""
        accelerator, checks = self.loop.accelerator, self.loop.checks
        batch = self._current_batch()
        checks.check_losses(losses, len(batch.weights))
        weighted = self._weigh(_LOSS, losses)
        self._ids.append(batch.ids)
        averaged_over = accelerator.num_processes * accelerator.gradient_accumulation_steps
        mean = weighted.sum() * (averaged_over / self.loss_denominator)
        checks.expect_backward(mean)
        return mean

    def log(self, name: str, values: torch.Tensor) -> None:
        """Adds a number to the step's line in metrics.jsonl, and to the trackers: the mean of (B,)
        values of the current micro-batch (another loss, 1 for a right answer) over the global
        batch, normalised as `mean` does. It is null unless each micro-batch of all processes logs
        it. Raises UserError as `mean`."""
        samples = len(self._current_batch().weights)
        if values.shape != (samples,):
            raise UserError(f"step.log takes {samples} values, not {tuple(values.shape)}")
        self._weigh(name, values)

    def _current_batch(self) -> Batch:
        if self._batch is None:
            what = "step.mean() and step.log()"
            raise UserError(f"call {what} inside `for batch in step.micro_batches(model)`")
        return self._batch

    def _weigh(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """(B,) values, times 1 or the class's weight; 0 for a padding sample."""
        weighted = values * self._current_batch().weights
        self._values.setdefault(name, []).append(weighted.detach())
        return weighted

    def sums(self) -> dict[str, float]:
        """`_LOSS` and each name of `log` -> the sum of this process's values; waits for them."""
        sums = {}
        for name, values in self._values.items():
            sums[name] = math.nan
            if len(values) == len(self.collations):
                sums[name] = torch.cat(values).cpu().double().sum().item()
        return sums

    def rows_without_finite_loss(self) -> list[int]:
        """In all processes; a collective."""
        losses, ids = torch.cat(self._values[_LOSS]), torch.cat(self._ids)
        rows = gather_object(ids[~torch.isfinite(losses)].tolist())
        return sorted(row for row in rows if row >= 0)


class Steps:
    """Iterates over the optimizer steps of a run; the order of samples does not depend on the
    processes.

        for step in steps:
            for batch in step.micro_batches(model): ...
            for metrics in steps.finish(step): ...
    """

    def __init__(
        self,
        accelerator: Accelerator,
        train: Split,
        tokenizer: Any,
        settings: TrainingSettings,
        schedule: Schedule,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
    ) -> None:
        """`model`, `optimizer`: prepared. `settings`: with `per_device_batch_size` as a number."""
        self.accelerator = accelerator
        self.train = train
        self.settings = settings
        self.schedule = schedule
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.syncs_each_batch = settings.sync_each_batch
        if settings.sync_each_batch is None:
            self.syncs_each_batch = accelerator.is_fsdp2
        modules = model.modules()
        self.recomputes = any(
            getattr(part, "gradient_checkpointing", False) for part in modules
        )
        self.checks = LoopChecks()
        self.checks.watch(model, optimizer)
        self.prefetcher = Prefetcher(accelerator.device)
        self.signals = StopSignals(accelerator.is_main_process)
        self.done = 0
        """Steps taken, with those whose update fp16 skipped."""
        self.stop_signal = 0
        """Number of a stop signal (SIGTERM, SIGUSR1, Ctrl-C) that any process received, or 0."""
        self.random_states: Mapping[str, Any] | None = None
        """Of a resumed checkpoint, if its ranks were the same; otherwise dropout is seeded."""
        self._collate = collator_of(train, tokenizer, accelerator.device)
        self._skipped = 0
        """Steps in a row, up to the last, whose gradient was not finite."""
        self._updates = 0
        """Of the schedule, before the current step."""
        self._pending: list[Step] = []
        self._steps_per_gather = settings.logging_steps or 1
        self._seconds_per_step = math.inf
        """On a GPU one step is gathered first, to measure it."""

    def _seed_dropout(self) -> None:
        """Seeds dropout by process and by the steps of a resumed run; the weights have been
        initialized before."""
        other = int(os.environ.get(OTHER_RANDOMNESS) or 0)
        seed = self.settings.seed + other + 1_000_003 * self.done
        set_seed(seed % 2**31, device_specific=True)

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps after `done`, with the order of samples by seed and epoch. Stop signals
        only set `stop_signal` meanwhile."""
        if self.random_states is None:
            self._seed_dropout()
        else:
            set_random_states(self.random_states)
        if self.accelerator.device.type == "cuda":  # without the search for a batch size
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        group = unwrapped_optimizer(self.optimizer).param_groups[0]
        with self.signals:
            remaining = self._remaining()
            step = next(remaining, None)
            while step is not None:
                step.next_step = next(remaining, None)
                step.started = time.perf_counter()
                step.learning_rate = float(group["lr"])
                self._updates = updates_done(self.scheduler)
                yield step
                step = step.next_step

    def _remaining(self) -> Iterator[Step]:
        train, settings, schedule = self.train, self.settings, self.schedule
        all_done = range(self.done, schedule.total_steps)
        by_epoch = itertools.groupby(
            all_done, lambda done: done // schedule.steps_per_epoch
        )
        for epoch, of_epoch in by_epoch:
            order = epoch_order(
                train.lengths,
                settings.global_batch_size,
                settings.seed,
                epoch,
                settings.group_by_length,
                train.sampling_probabilities,
            )
            for done in of_epoch:
                start = done % schedule.steps_per_epoch * settings.global_batch_size
                indices = order[start : start + settings.global_batch_size]
                collate = self._collate.at(epoch)
                denominator = collate.loss_denominators(indices).sum().item()
                # 1 if no text has a target token: their loss is 0
                collations = self._collations(collate, indices)
                yield Step(self, done + 1, indices, collations, denominator or 1)

    def _collations(self, collate: Collator, indices: np.ndarray) -> list[partial[Batch]]:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        samples = micro_batches(
            self.train,
            indices,
            self.settings.micro_batch_size,
            world,
            self.settings.max_tokens_per_batch,
        )
        return [
            partial(collate_padded, collate, some, max(1, len(some)))
            for some in samples[rank::world]
        ]

    def finish(self, step: Step) -> Iterator[StepMetrics]:
        """Yields the metrics of this step and of earlier steps, or nothing until the next gather
        (`logging_steps`). Gathering synchronises the device, and shares a stop signal with all
        processes; all of them call this.

        Raises UserError, in every process, for the first step whose loss or gradient is not finite,
        and for a step that lacks a call."""
        self._check_calls(step)
        self._broadcast_buffers()
        step.seconds = time.perf_counter() - step.started
        if self.accelerator.device.type == "cpu":
            memory.manage_freed_memory()
        self.done = step.number
        self._pending.append(step)
        every = self.settings.checkpoint_every
        saves = every is not None and step.number % every == 0
        if len(self._pending) >= self._steps_per_gather or step.evaluates or saves:
            yield from self.flush()

    def _check_calls(self, step: Step) -> None:
        schedule_steps = updates_done(self.scheduler) - self._updates
        was_skipped = self.optimizer.step_was_skipped
        self.checks.end_step(len(step.collations), schedule_steps, was_skipped)
        if step.grad_norm is None:
            how = (
                "step.grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)"
            )
            raise UserError(f"step {step.number}: set `{how}` after the micro-batches")

    def flush(self) -> Iterator[StepMetrics]:
        """Yields the metrics of the steps since the last gather, as `finish`; all processes call
        this."""
        finished, self._pending = self._pending, []
        if finished:
            for step, metrics in zip(finished, self._gather(finished), strict=True):
                self._refuse_non_finite(step, metrics)
                yield metrics

    def _gather(self, finished: list[Step]) -> list[StepMetrics]:
        """The metrics of any number of steps."""
        started = time.perf_counter()
        own = {
            "sums": [step.sums() for step in finished],
            "grad_norms": [norm_of(step.grad_norm) for step in finished],
            "peak_memory": peak_memory_bytes(self.accelerator.device),
            "stop_signal": self.signals.requested,
            "seconds_per_step": self._seconds_per_step,
        }
        by_rank = gather_object([own])
        launch.exit_state.explain = None  # later failures are not a micro-batch's
        self.stop_signal = max(each["stop_signal"] for each in by_rank)
        if self.settings.logging_steps is None and self.accelerator.device.type != "cpu":
            per_step = by_rank[0]["seconds_per_step"]  # the same number on all ranks
            self._steps_per_gather = max(1, int(_GATHER_SECONDS / per_step))
        seconds = time.perf_counter() - started + sum(step.seconds for step in finished)
        self._seconds_per_step = seconds / len(finished)
        samples = sum(len(step.indices) for step in finished)
        tokens = sum(step.tokens for step in finished)
        lines = []
        for index, step in enumerate(finished):
            sums = [each["sums"][index] for each in by_rank]
            means = mean_by_name(sums, step.loss_denominator)
            lines.append(
                StepMetrics(
                    step=step.number,
                    epoch=round(step.number / self.schedule.steps_per_epoch, 4),
                    loss=means.pop(_LOSS),
                    learning_rate=step.learning_rate,
                    grad_norm=by_rank[0]["grad_norms"][index],
                    samples=len(step.indices),
                    tokens=step.tokens,
                    samples_per_second=round(samples / seconds, 2),
                    tokens_per_second=round(tokens / seconds, 1),
                    peak_memory_bytes=max(each["peak_memory"] for each in by_rank),
                    logged=means,
                )
            )
        return lines

    def _refuse_non_finite(self, step: Step, metrics: StepMetrics) -> None:
        """Raises UserError, in every process, when the loss or gradient norm is not finite. fp16
        skips steps with such gradients: there only too many in a row raise."""
        self._skipped = 0 if math.isfinite(metrics.grad_norm) else self._skipped + 1
        allowed = _MAX_SKIPPED if self.accelerator.mixed_precision == "fp16" else 0
        if math.isfinite(metrics.loss) and self._skipped <= allowed:
            return
        rows = step.rows_without_finite_loss()
        what = "the gradient is"
        if rows:
            what = f"the loss of rows {listing(row + 1 for row in rows)} is"
        numbers = f"loss {metrics.loss}, gradient norm {metrics.grad_norm}"
        rate = f"lower --learning_rate (now {metrics.learning_rate:.3g})"
        remedy = (
            f"check those texts and labels, {rate}, or use --mixed_precision bf16 or no"
        )
        raise UserError(f"step {step.number}: {what} not finite ({numbers}): {remedy}")

    def _broadcast_buffers(self) -> None:
        """Broadcasts rank 0's running means (BatchNorm's), as DDP does: otherwise each would
        evaluate with other ones."""
        accelerator = self.accelerator
        is_sharded = accelerator.state.deepspeed_plugin or accelerator.is_fsdp2
        if accelerator.num_processes > 1 and is_sharded:
            for _, buffer in floating_buffers(unwrapped(self.model)):
                torch.distributed.broadcast(buffer, 0)
