"""Optimizer steps: their micro-batches, one normalisation, one update, one line of metrics.

The gradient of a step is that of the mean loss over its *global* batch, whatever the number of
processes and micro-batches: each process adds up its samples' losses and divides by the number of
samples of the whole global batch (of the tokens to be predicted, where the loss is theirs).
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from toolkit import launch, memory
from toolkit.config import TrainingSettings
from toolkit.data.batches import Batch, collator_of, epoch_order, most_rounds, shares
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.launch.signals import StopSignals


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

    def evaluates_after(self, step: int) -> bool:
        """At every `eval_every`th step, and at the end."""
        return step % self.eval_every == 0 or step == self.total_steps


def make_schedule(settings: TrainingSettings, train: Split, processes: int) -> Schedule:
    """Raises UserError when a text alone exceeds the most tokens that a batch may have."""
    _refuse_too_long(settings, train.lengths)
    steps_per_epoch = -(-len(train) // settings.global_batch_size)
    total = settings.max_steps or math.ceil(settings.num_train_epochs * steps_per_epoch)
    accumulation = most_rounds(
        train,
        settings.global_batch_size,
        settings.per_device_batch_size,
        processes,
        settings.max_tokens_per_batch,
    )
    largest = -(-settings.global_batch_size // (accumulation * processes))
    return Schedule(steps_per_epoch, total, accumulation, largest, settings.eval_every or steps_per_epoch)


def _refuse_too_long(settings: TrainingSettings, lengths: np.ndarray) -> None:
    longest, most = int(lengths.max()), settings.max_tokens_per_batch
    if most is not None and longest > most:
        raise UserError(
            f"--max_tokens_per_batch {most} is less than the longest text, which has {longest} tokens: raise it, or "
            f"cut texts with --max_length {most}"
        )


@dataclass
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int
    epoch: float
    loss: float
    """Mean over the global batch's samples, or over its titles' tokens."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    samples: int
    tokens: int
    """Of this step, padding not counted."""
    samples_per_second: float
    tokens_per_second: float
    peak_memory_bytes: int
    """The most any process has held: device memory, or resident memory on a CPU."""


@dataclass
class Step:
    """One optimizer step; `for batch in step.micro_batches(): step.backward(losses)`, then `step.update()`."""

    loop: Loop
    number: int
    """Counted from 1."""
    indices: np.ndarray
    """Samples of the global batch."""
    tokens: int
    """Real tokens of the global batch."""
    terms: int
    """What its loss is the mean over: its samples, or the tokens of their titles."""
    started: float = field(default_factory=time.perf_counter)
    stopping: bool = False
    """After the update, in every process: whether any of them was told to stop (SIGTERM, SIGUSR1, Ctrl-C)."""
    _batch: Batch | None = None
    _losses: list[torch.Tensor] = field(default_factory=list)
    _ids: list[torch.Tensor] = field(default_factory=list)

    def micro_batches(self) -> Iterator[Batch]:
        """This process's micro-batches; gradients travel between processes in the last one only."""
        loop, accelerator = self.loop, self.loop.accelerator
        mine = shares(
            loop.train,
            self.indices,
            loop.settings.per_device_batch_size,
            accelerator.process_index,
            accelerator.num_processes,
            loop.settings.max_tokens_per_batch,
        )
        for place, share in enumerate(mine):
            last = place == len(mine) - 1
            accelerator.sync_gradients = last
            self._batch = loop.collate.share(share)
            launch.explain_failures(partial(memory.of_training, self._batch, loop.recomputes))
            with contextlib.nullcontext() if last else accelerator.no_sync(loop.model):
                yield self._batch

    def backward(self, losses: torch.Tensor) -> None:
        """(B,) losses of the current micro-batch -> gradients of the global mean.

        Where a sample's loss is the sum over its title's tokens, the mean is over the tokens of all titles.
        Data parallel training averages over processes, and accelerate (or DeepSpeed) over the declared
        accumulation: both are undone here, the number of terms of the global batch takes their place.
        """
        batch, accelerator = self._batch, self.loop.accelerator
        if batch is None:
            raise RuntimeError("backward() belongs inside `for batch in step.micro_batches()`")
        weighted = losses * batch.weights  # (B,)
        undone = accelerator.num_processes * accelerator.gradient_accumulation_steps
        accelerator.backward(weighted.sum() * (undone / self.terms))
        self._losses.append(weighted.detach())
        self._ids.append(batch.ids)

    def update(self) -> StepMetrics:
        """Clips, updates the weights, moves the schedule; returns what to record.

        Raises UserError, in every process, when the loss or the gradient is not finite.
        """
        loop, accelerator = self.loop, self.loop.accelerator
        learning_rate = float(loop.scheduler.get_last_lr()[0])
        norm = accelerator.clip_grad_norm_(loop.model.parameters(), loop.settings.max_grad_norm or math.inf)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            loop.scheduler.step()
        loss_sum, peak, told = self._over_processes()
        loop.done, self.stopping, loop.told = self.number, bool(told), told
        grad_norm = float(norm) if norm is not None else math.nan
        seconds = time.perf_counter() - self.started
        metrics = StepMetrics(
            step=self.number,
            epoch=round(self.number / loop.schedule.steps_per_epoch, 4),
            loss=loss_sum / self.terms,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            samples=len(self.indices),
            tokens=self.tokens,
            samples_per_second=round(len(self.indices) / seconds, 2),
            tokens_per_second=round(self.tokens / seconds, 1),
            peak_memory_bytes=peak,
        )
        self._refuse_non_finite(metrics)
        return metrics

    def _over_processes(self) -> tuple[float, int, int]:
        """(sum of the global batch's losses, largest memory of any process, number of a signal that told any
        of them to stop): one small collective, so that all of them decide alike."""
        device = self.loop.accelerator.device
        # MPS knows no float64
        dtype = torch.float32 if device.type == "mps" else torch.float64
        local = torch.stack([loss.sum(dtype=dtype) for loss in self._losses]).sum()
        others = torch.tensor([peak_memory_bytes(device), self.loop.signals.requested], dtype=dtype, device=device)
        gathered = self.loop.accelerator.gather(torch.cat([local[None], others])[None])  # (processes, 3)
        loss_sum, peak, told = gathered[:, 0].sum().item(), gathered[:, 1].max().item(), gathered[:, 2].max().item()
        return loss_sum, int(peak), int(told)

    def _refuse_non_finite(self, metrics: StepMetrics) -> None:
        scaled = self.loop.accelerator.mixed_precision == "fp16"  # there an infinite gradient only skips a step
        if math.isfinite(metrics.loss) and (scaled or math.isfinite(metrics.grad_norm)):
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


def peak_memory_bytes(device: torch.device) -> int:
    """Device memory where the device counts it, otherwise the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class Loop:
    """`for step in loop.steps(): ...`: every optimizer step of a run, in the same order everywhere."""

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    train: Split
    tokenizer: Any
    settings: TrainingSettings
    schedule: Schedule

    def __post_init__(self) -> None:
        self.lengths, self.loss_terms = self.train.lengths, self.train.loss_terms
        self.collate = collator_of(self.train, self.tokenizer, self.accelerator.device)
        self.recomputes = any(getattr(part, "gradient_checkpointing", False) for part in self.model.modules())
        self.done = 0
        """Optimizer steps taken."""
        self.told = 0
        """The signal that told a process to stop."""
        self.signals = StopSignals(self.accelerator.is_main_process)
        self.randomness: Callable[[], None] = self._fresh_randomness

    def _fresh_randomness(self) -> None:
        """The weights are made; from here on each process has its own dropout."""
        set_seed(self.settings.seed, device_specific=True)

    def steps(self) -> Iterator[Step]:
        """The steps after those that are `done`, in the global order of samples, which depends on the seed
        and the epoch only. While it runs, a signal to stop is kept until the step is done."""
        self.randomness()
        per_epoch = self.schedule.steps_per_epoch
        with self.signals:
            for epoch in range(self.done // per_epoch, -(-self.schedule.total_steps // per_epoch)):
                order = epoch_order(
                    self.lengths,
                    self.settings.global_batch_size,
                    self.settings.seed,
                    epoch,
                    self.settings.group_by_length,
                )
                for number, indices in enumerate(order, epoch * per_epoch + 1):
                    if self.done < number <= self.schedule.total_steps:
                        self.model.train()
                        tokens, terms = int(self.lengths[indices].sum()), int(self.loss_terms[indices].sum())
                        yield Step(self, number, indices, tokens, terms)
