"""Optimizer steps: which samples each one takes, in which micro-batches, and what its loss is divided by.

**Where the loss is normalised: `Step.mean`.** The gradient of a step is that of the mean loss over its
*global* batch, whatever the number of processes and micro-batches. Each process sums the losses of its own
samples and divides by the loss denominator of the whole global batch: its number of samples, or of target
tokens where the loss is theirs. Which samples those are is decided in `toolkit.data.batches`.
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
from toolkit.data.batches import Batch, collator_of, global_batches, micro_batches, most_micro_batches
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
    """Mean over the global batch's samples, or over its titles' tokens."""
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
    """The most any process has held: device memory, or resident memory on a CPU."""


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
    loss_denominator: int
    """What the sum of the global batch's losses is divided by: its samples, or the tokens of its titles."""
    learning_rate: float = math.nan
    """Of this step's update."""
    metrics: StepMetrics = field(init=False)
    """Once they are gathered."""
    started: float = field(default_factory=time.perf_counter)
    _batch: Batch | None = None
    _computed_tokens: int = 0
    """Of this process, padding counted."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    _ids: list[torch.Tensor] = field(default_factory=list)

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is due after it: at every `eval_every`th step, and at the last."""
        schedule = self.steps.schedule
        return self.number % schedule.eval_every == 0 or self.number == schedule.total_steps

    def micro_batches(self, model: torch.nn.Module) -> Iterator[Batch]:
        """Yields this process's micro-batches; the gradients of `model` are synchronised in the last one only."""
        accelerator, settings = self.steps.accelerator, self.steps.settings
        rank, world, most = accelerator.process_index, accelerator.num_processes, settings.max_tokens_per_batch
        mine = micro_batches(self.steps.train, self.indices, settings.micro_batch_size, rank, world, most)
        for place, indices in enumerate(mine):
            accelerator.sync_gradients = place == len(mine) - 1
            self._batch = self.steps.collate(indices)
            self._computed_tokens += self._batch.inputs["input_ids"].numel()
            launch.explain_failures(partial(_out_of_memory, self._batch, model))
            with contextlib.nullcontext() if accelerator.sync_gradients else accelerator.no_sync(model):
                yield self._batch

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """(B,) losses of the current micro-batch -> its part, a scalar, of the mean over the global batch.

        Hand it to `accelerator.backward`. Where a sample's loss is the sum over its title's tokens, the mean is
        over the tokens of all titles. Data parallel training averages gradients over processes, and accelerate
        (or DeepSpeed) over the declared accumulation: the factor cancels both, so that only the division by the
        global loss denominator remains.

        Raises RuntimeError outside `micro_batches`, ValueError unless there is one loss per sample.
        """
        batch, accelerator = self._batch, self.steps.accelerator
        if batch is None:
            raise RuntimeError("step.mean() belongs inside `for batch in step.micro_batches(model)`")
        if losses.shape != batch.weights.shape:
            raise ValueError(
                f"step.mean() wants one loss per sample, shape {tuple(batch.weights.shape)}, and got "
                f"{tuple(losses.shape)}: leave the mean over the batch out (reduction='none')"
            )
        weighted = losses * batch.weights  # (B,); weight 0: a sample that only keeps the processes in step
        self._losses.append(weighted.detach())
        self._ids.append(batch.ids)
        averaged_over = accelerator.num_processes * accelerator.gradient_accumulation_steps
        return weighted.sum() * (averaged_over / self.loss_denominator)

    def gather_metrics(self, grad_norm: Any) -> StepMetrics:
        """What to record of the finished step; collective, and where all processes learn of a stop signal.

        Raises UserError, in every process, when the loss or the gradient is not finite.
        """
        steps = self.steps
        loss_sum, peak, stop_signal, computed = self._over_processes()
        launch.explain_failures()  # what fails from here on is no longer the micro-batch's
        steps.done, steps.stop_signal = self.number, stop_signal
        seconds = time.perf_counter() - self.started
        self.metrics = StepMetrics(
            step=self.number,
            epoch=round(self.number / steps.schedule.steps_per_epoch, 4),
            loss=loss_sum / self.loss_denominator,
            learning_rate=self.learning_rate,
            grad_norm=float(grad_norm) if grad_norm is not None else math.nan,
            samples=len(self.indices),
            tokens=self.tokens,
            samples_per_second=round(len(self.indices) / seconds, 2),
            tokens_per_second=round(self.tokens / seconds, 1),
            padding=round(1 - self.tokens / computed, 4),
            mfu=steps.utilization and round(steps.utilization(steps.train.lengths[self.indices], seconds), 4),
            peak_memory_bytes=peak,
        )
        self._refuse_non_finite(self.metrics)
        return self.metrics

    def _over_processes(self) -> tuple[float, int, int, int]:
        """(sum of the global batch's losses, largest memory of any process, a stop signal that any of them got,
        or 0, all tokens they computed): one small collective, so that all of them decide alike."""
        accelerator = self.steps.accelerator
        # MPS knows no float64
        dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        loss_sum = torch.stack([loss.sum(dtype=dtype) for loss in self._losses]).sum()
        others = [peak_memory_bytes(accelerator.device), self.steps.signals.requested, self._computed_tokens]
        local = torch.cat([loss_sum[None], torch.tensor(others, dtype=dtype, device=accelerator.device)])
        gathered = accelerator.gather(local[None])  # (processes, 4)
        (loss_sum, *_, computed), (_, peak, signal, _) = gathered.sum(0).tolist(), gathered.max(0).values.tolist()
        return loss_sum, int(peak), int(signal), int(computed)

    def _refuse_non_finite(self, metrics: StepMetrics) -> None:
        scaled = self.steps.accelerator.mixed_precision == "fp16"  # there an infinite gradient only skips a step
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


def _out_of_memory(batch: Batch, model: torch.nn.Module, error: Exception) -> str | None:
    recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return memory.answer(batch, recomputes, error)


def peak_memory_bytes(device: torch.device) -> int:
    """Device memory where the device counts it, otherwise the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Steps:
    """`for step in steps`: every optimizer step of a run, with the same samples in the same order everywhere."""

    def __init__(self, accelerator: Accelerator, train: Split, tokenizer: Any, settings: TrainingSettings) -> None:
        """Raises UserError when a text alone exceeds the most tokens that a batch may have."""
        self.accelerator, self.train, self.settings = accelerator, train, settings
        self.schedule = make_schedule(settings, train, accelerator.num_processes)
        self.collate = collator_of(train, tokenizer, accelerator.device)
        self.done = 0
        """Optimizer steps taken."""
        self.stop_signal = 0
        """The number of a stop signal that any process got (SIGTERM, SIGUSR1, Ctrl-C)."""
        self.utilization: Callable[[np.ndarray, float], float] | None = None
        """(lengths of a step's texts, seconds) -> its MFU."""
        self.signals = StopSignals(accelerator.is_main_process)
        self.set_randomness: Callable[[], None] = self._fresh_randomness

    def _fresh_randomness(self) -> None:
        """The weights are made; from here on each process has its own dropout."""
        set_seed(self.settings.seed, device_specific=True)

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps after those that are `done`, in the global order of samples, which depends on the seed
        and the epoch only. While it runs, a stop signal is kept until the step is done."""
        self.set_randomness()
        per_epoch, total = self.schedule.steps_per_epoch, self.schedule.total_steps
        lengths, denominators = self.train.lengths, self.train.loss_denominators
        size, seed, by_length = self.settings.global_batch_size, self.settings.seed, self.settings.group_by_length
        with self.signals:
            for epoch in range(self.done // per_epoch, -(-total // per_epoch)):
                order = global_batches(lengths, size, seed, epoch, by_length)
                for number, indices in enumerate(order, epoch * per_epoch + 1):
                    if self.done < number <= total:
                        tokens, denominator = int(lengths[indices].sum()), int(denominators[indices].sum())
                        yield Step(self, number, indices, tokens, denominator)
