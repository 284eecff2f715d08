"""Optimizer steps: which samples each one takes, in which micro-batches, and what its loss is divided by.

**Where the loss is normalised: `Step.mean`.** The gradient of a step is that of the mean loss over its
*global* batch, whatever the number of processes and micro-batches. Each process sums the losses of its own
samples and divides by the loss denominator of the whole global batch: its number of samples (the sum of their
weights, where they have some), or of target tokens where the loss is theirs. Which samples those are is decided
in `toolkit.data.batches`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.distributed.tensor import DTensor

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.batches import (
    Ahead,
    Batch,
    Collation,
    Collator,
    GlobalBatches,
    collator_of,
    micro_batches,
    most_micro_batches,
)
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.launch.signals import StopSignals
from toolkit.training.checks import refuse_changes, refuse_foreign_parameters, refuse_shards
from toolkit.training.dropout import draw_dropout_faster
from toolkit.utils import memory

# How often a GPU is synchronised where --logging_steps is not given; a stop signal waits as long.
_GATHER_SECONDS = 1.0
# Each step that fp16 skips halves the loss scale, which begins at 2**16: after 16 it is 1.
_MOST_SKIPPED = 15


@dataclass(frozen=True)
class Schedule:
    """How many optimizer steps a run takes."""

    steps_per_epoch: int
    total_steps: int
    accumulation: int
    """The most micro-batches of one optimizer step on one process."""
    micro_batch_size: int
    """Samples of one micro-batch, as it is declared to DeepSpeed; some have more where tokens are counted."""
    eval_every: int


def make_schedule(settings: TrainingSettings, train: Split, processes: int) -> Schedule:
    """Raises UserError when a text alone exceeds the most tokens that a batch may have."""
    longest, most = int(train.lengths.max()), settings.max_tokens_per_batch
    if most is not None and longest > most:
        raise UserError(
            f"--max_tokens_per_batch {most} is less than the longest text, which has {longest} tokens: raise it, or "
            f"cut texts with --max_length {most}"
        )
    steps_per_epoch = -(-len(train) // settings.global_batch_size)
    total = settings.max_steps or math.ceil(settings.num_train_epochs * steps_per_epoch)
    accumulation = most_micro_batches(train, settings.global_batch_size, settings.micro_batch_size, processes, most)
    largest = -(-settings.global_batch_size // (accumulation * processes))
    return Schedule(steps_per_epoch, total, accumulation, largest, settings.eval_every or steps_per_epoch)


@dataclass
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int
    epoch: float
    loss: float
    """Mean over the global batch's samples, or over the tokens that are predicted of them."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    samples: int
    tokens: int
    """Of this step, padding not counted."""
    samples_per_second: float
    tokens_per_second: float
    padding: float
    """The part of all tokens that the processes computed which was padding."""
    mfu: float | None
    """Of all devices (`toolkit.training.mfu`); None where their peak is not known."""
    peak_memory_bytes: int
    """The most of any process since training began or last evaluated: device memory, or resident memory on a CPU."""


@dataclass
class Step:
    """One optimizer step: a global batch, of which each process computes some micro-batches."""

    steps: Steps
    number: int
    """Counted from 1."""
    indices: np.ndarray
    """Samples of the global batch."""
    tokens: int
    """Real tokens of the global batch."""
    loss_denominator: float
    """What the sum of the global batch's losses is divided by: its samples, the sum of their weights, or the tokens
    that are predicted."""
    collate: Collator | None = None
    """What makes its batches, where that is not the run's."""
    learning_rate: float = math.nan
    """Of this step's update."""
    following: Step | None = None
    started: float = 0.0
    seconds: float = math.nan
    grad_norm: Any = None
    metrics: StepMetrics = field(init=False)
    """Once they are gathered."""
    _batch: Batch | None = None
    _computed_tokens: int = 0
    """Of this process, padding counted."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    _ids: list[torch.Tensor] = field(default_factory=list)
    _refusal: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Of sharded parameters in a loss: in the first micro-batch of a run."""
    _first_model: torch.nn.Module | None = None
    """The model, until the loss of the first micro-batch of a run is checked."""

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is due after it: at every `eval_every`th step, and at the last."""
        schedule = self.steps.schedule
        return self.number % schedule.eval_every == 0 or self.number == schedule.total_steps

    @functools.cached_property
    def local_samples(self) -> list[np.ndarray]:
        """The samples of each of this process's micro-batches."""
        accelerator, settings = self.steps.accelerator, self.steps.settings
        rank, world = accelerator.process_index, accelerator.num_processes
        size, most = settings.micro_batch_size, settings.max_tokens_per_batch
        return micro_batches(self.steps.train, self.indices, size, rank, world, most)

    @functools.cached_property
    def collations(self) -> list[Collation]:
        """Of `local_samples`."""
        return [partial(self.collate or self.steps.collate, indices) for indices in self.local_samples]

    def micro_batches(self, model: torch.nn.Module) -> Iterator[Batch]:
        """Yields this process's micro-batches; the gradients of `model` are synchronised in the last one only, or in
        each where `sync_each_batch` says so. Raises UserError where `requires_grad` of its parameters has changed."""
        accelerator = self.steps.accelerator
        refuse_changes(model)
        after = [*self.collations[1:], self.following.collations[0] if self.following else None]
        for collation, following in zip(self.collations, after, strict=True):
            accelerator.sync_gradients = collation is self.collations[-1]
            self._batch = self.steps.ahead.batch(collation, following)
            self._computed_tokens += self._batch.inputs["input_ids"].numel()
            launch.explain_failures(partial(_out_of_memory, self._batch, model))
            with contextlib.nullcontext() if self._reduces else accelerator.no_sync(model), self._refusal:
                if not self.steps.has_started:
                    self.steps.has_started, self._first_model = True, model
                    self._refusal.enter_context(refuse_shards(model))
                yield self._batch

    @property
    def _reduces(self) -> bool:
        """Whether gradients are reduced after the current micro-batch."""
        accelerator, each = self.steps.accelerator, self.steps.settings.sync_each_batch
        return bool(accelerator.sync_gradients or (accelerator.is_fsdp2 if each is None else each))

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """(B,) losses of the current micro-batch -> its part, a scalar, of the mean over the global batch.

        Hand it to `accelerator.backward`. Where a sample's loss is the sum over tokens of it, the mean is over those of
        all samples. Data parallel training averages gradients over processes, and accelerate (or DeepSpeed) over the
        declared accumulation: the factor cancels both, so that only the division by the global loss denominator
        remains.

        Raises RuntimeError outside `micro_batches`, UserError unless there is one loss per sample.
        """
        batch, accelerator = self._batch, self.steps.accelerator
        if batch is None:
            raise RuntimeError("step.mean() belongs inside `for batch in step.micro_batches(model)`")
        if losses.shape != batch.weights.shape:
            raise UserError(
                f"step.mean() takes one loss per sample, shape {tuple(batch.weights.shape)}, and got "
                f"{tuple(losses.shape)}: leave the mean over the batch out (reduction='none')"
            )
        if self._first_model is not None:
            refuse_foreign_parameters(self._first_model, losses)
            self._refusal.close()
            self._first_model = None
        weighted = losses * batch.weights  # (B,); 1, or its class's; 0: padding, where another process has a sample
        self._losses.append(weighted.detach())
        self._ids.append(batch.ids)
        averaged_over = accelerator.num_processes * accelerator.gradient_accumulation_steps
        return weighted.sum() * (averaged_over / self.loss_denominator)

    def refuse_non_finite(self) -> None:
        """Raises UserError, in every process, when the gathered loss or gradient is not finite; of gradients in fp16,
        where such a step is skipped, when too many in a row are not."""
        metrics, steps = self.metrics, self.steps
        steps.skipped = 0 if math.isfinite(metrics.grad_norm) else steps.skipped + 1
        most = _MOST_SKIPPED if steps.accelerator.mixed_precision == "fp16" else 0
        if math.isfinite(metrics.loss) and steps.skipped <= most:
            return
        losses, ids = torch.cat(self._losses), torch.cat(self._ids)
        bad = ids[~torch.isfinite(losses)].tolist()
        rows = [row for row in sorted(gather_object(bad)) if row >= 0]
        what = f"the loss of rows {listing(row + 1 for row in rows)} is" if rows else "the gradient is"
        raise UserError(
            f"step {metrics.step}: {what} not finite (loss {metrics.loss}, gradient norm {metrics.grad_norm}): "
            f"look at those texts and labels, lower --learning_rate (now {metrics.learning_rate:.3g}), or use "
            "--mixed_precision bf16 or no"
        )


def _out_of_memory(batch: Batch, model: torch.nn.Module, error: Exception) -> str | None:
    recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return memory.explain(batch, recomputes, error)


def peak_memory_bytes(device: torch.device) -> int:
    """Device memory where the device counts it, otherwise the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Measures the peak from here on: on CUDA, and on a CPU under Linux (proc(5))."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):  # some sandboxes have no such file
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Steps:
    """`for step in steps`: every optimizer step of a run, with the same samples in the same order everywhere."""

    def __init__(self, accelerator: Accelerator, train: Split, tokenizer: Any, settings: TrainingSettings) -> None:
        """Raises UserError when a text alone exceeds the most tokens that a batch may have."""
        self.accelerator, self.train, self.settings = accelerator, train, settings
        self.schedule = make_schedule(settings, train, accelerator.num_processes)
        if accelerator.device.type == "cpu":
            draw_dropout_faster()
        self.ahead, self.collate = Ahead(accelerator.device), collator_of(train, tokenizer, accelerator.device)
        self.done = 0
        """Global batches computed; fp16 may have skipped the update of some."""
        self.skipped = 0
        """How many of the last had a gradient that was not finite."""
        self.stop_signal = 0
        """The number of a stop signal that any process received (SIGTERM, SIGUSR1, Ctrl-C)."""
        self.utilization: Callable[[np.ndarray, float], float] | None = None
        """(lengths of texts, seconds) -> the MFU of a training on them."""
        self.signals = StopSignals(accelerator.is_main_process)
        self.has_started = False
        """Whether there was a micro-batch."""
        self.set_randomness: Callable[[], None] = self._seed_dropout
        self._pending: list[Step] = []
        self._at_once, self._seconds_per_step = settings.logging_steps or 1, math.inf

    def _seed_dropout(self) -> None:
        """The weights exist; from here on each process draws dropout of its own."""
        set_seed(self.settings.seed + int(os.environ.get(OTHER_RANDOMNESS) or 0), device_specific=True)

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps after those that are `done`, in the global order of samples, which depends on the seed
        and the epoch only. Meanwhile a stop signal waits until the step is done."""
        self.set_randomness()
        device = self.accelerator.device
        reset_peak_memory(device)  # of the data, a teacher, or the search for a batch that fits
        with self.signals:
            remaining = self._remaining()
            step = next(remaining, None)
            while step is not None:
                step.following, step.started = next(remaining, None), time.perf_counter()
                yield step
                if step.evaluates:
                    reset_peak_memory(device)
                step = step.following

    def _remaining(self) -> Iterator[Step]:
        per_epoch, train, settings = self.schedule.steps_per_epoch, self.train, self.settings
        steps = range(self.done, self.schedule.total_steps)
        for epoch, numbers in itertools.groupby(steps, lambda number: number // per_epoch):
            size, by_length = settings.global_batch_size, settings.group_by_length
            order = GlobalBatches(train.lengths, size, settings.seed, epoch, by_length, train.chances)
            for number in numbers:
                indices = order[number % per_epoch]
                collate = self.collate.at(epoch, number / self.schedule.total_steps)
                tokens, denominator = train.lengths[indices].sum(), collate.loss_denominators(indices).sum()
                # 1: texts without a token that could be predicted have no loss
                yield Step(self, number + 1, indices, int(tokens), denominator.item() or 1, collate)

    def finish(self, step: Step, grad_norm: Any) -> Iterator[StepMetrics]:
        """Yields the metrics of this step and of those before it that were not gathered: nothing in most steps where
        `logging_steps` is more than 1. Gathering synchronises the device, and shares a stop signal with all processes;
        all of them call this.

        Raises UserError, in every process, at the first step whose loss or gradient is not finite.
        """
        step.grad_norm, step.seconds, step._batch = grad_norm, time.perf_counter() - step.started, None
        if self.accelerator.device.type == "cpu":
            memory.manage_freed_memory()
        self.done, signal = step.number, self.signals.requested
        self._pending.append(step)
        saves = self.settings.checkpoint_every is not None and step.number % self.settings.checkpoint_every == 0
        if len(self._pending) < self._at_once and not step.evaluates and not saves:
            return
        finished, self._pending = self._pending, []
        self._gather(finished, signal)
        for each in finished:
            each.refuse_non_finite()
            yield each.metrics

    def _gather(self, finished: list[Step], signal: int) -> None:
        """One small collective and one copy to the host, for any number of steps."""
        device, count, start = self.accelerator.device, len(finished), time.perf_counter()
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        numbers = [peak_memory_bytes(device), signal, self._seconds_per_step]
        process = torch.tensor(numbers, dtype=dtype, device=device)
        sums = [torch.stack([loss.sum(dtype=dtype) for loss in step._losses]).sum() for step in finished]
        norms = [_whole(step.grad_norm).to(device, dtype) for step in finished]
        computed = torch.tensor([step._computed_tokens for step in finished], dtype=dtype, device=device)
        local = torch.cat([process, torch.stack([*sums, *norms]), computed])
        ranks = self.accelerator.gather(local[None]).tolist()  # (processes, 3 + 3 steps)
        launch.explain_failures()  # what fails from here on is no longer a micro-batch's
        peak, self.stop_signal = (int(max(rank[place] for rank in ranks)) for place in (0, 1))
        if self.settings.logging_steps is None and device.type != "cpu":
            self._at_once = max(1, int(_GATHER_SECONDS / ranks[0][2]))
        seconds = time.perf_counter() - start + sum(step.seconds for step in finished)
        self._seconds_per_step = seconds / count
        samples, tokens = sum(len(step.indices) for step in finished), sum(step.tokens for step in finished)
        lengths = self.train.lengths[np.concatenate([step.indices for step in finished])]
        mfu = self.utilization and round(self.utilization(lengths, seconds), 4)
        for place, step in enumerate(finished, 3):
            step.metrics = StepMetrics(
                step=step.number,
                epoch=round(step.number / self.schedule.steps_per_epoch, 4),
                loss=math.fsum(rank[place] for rank in ranks) / step.loss_denominator,
                learning_rate=step.learning_rate,
                grad_norm=ranks[0][place + count],
                samples=len(step.indices),
                tokens=step.tokens,
                samples_per_second=round(samples / seconds, 2),
                tokens_per_second=round(tokens / seconds, 1),
                padding=round(1 - step.tokens / sum(rank[place + 2 * count] for rank in ranks), 4),
                mfu=mfu,
                peak_memory_bytes=peak,
            )


def _whole(norm: Any) -> torch.Tensor:
    """A gradient's norm, a scalar, from what strategies return: a tensor, parts of one, a number, or nothing."""
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if isinstance(norm, torch.Tensor):
        return norm.detach().reshape(())
    return torch.tensor(math.nan if norm is None else float(norm))
