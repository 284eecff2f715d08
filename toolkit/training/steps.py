"""Optimizer steps: their micro-batches, loss normalisation (`Step.mean`) and metrics. `toolkit.data.batches` chooses
the samples."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.distributed.tensor import DTensor

from toolkit import launch
from toolkit.checkpoint.parameters import floating_buffers
from toolkit.config import TrainingSettings
from toolkit.data.batches import (
    Batch,
    Collator,
    GlobalBatches,
    Prefetcher,
    accumulation_of,
    collator_of,
    micro_batches,
)
from toolkit.data.tokens import Split
from toolkit.errors import UserError, first_line, listing
from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.launch.signals import StopSignals
from toolkit.training.checks import LoopChecks
from toolkit.training.dropout import install_fast_dropout
from toolkit.utils import memory
from toolkit.utils.modules import unwrapped

# How often metrics and stop signals are gathered on a GPU if --logging_steps is not set
_GATHER_SECONDS = 1.0
# Each step that fp16 skips halves the loss scale: 16 in a row take it from 2**16 to 1
_MAX_SKIPPED = 15


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of a run."""

    steps_per_epoch: int
    total_steps: int
    accumulation: int
    """Maximum micro-batches of one optimizer step on one process."""
    micro_batch_size: int
    """Samples of one micro-batch, for DeepSpeed's config; with `max_tokens_per_batch` some have more."""
    eval_every: int


def make_schedule(settings: TrainingSettings, train: Split, processes: int) -> Schedule:
    """Raises UserError if a text is longer than `max_tokens_per_batch`."""
    longest, max_tokens = int(train.lengths.max()), settings.max_tokens_per_batch
    if max_tokens is not None and longest > max_tokens:
        why = f"--max_tokens_per_batch {max_tokens} is less than the longest text, which has {longest} tokens"
        raise UserError(f"{why}: raise it, or truncate texts with --max_length {max_tokens}")
    steps_per_epoch = -(-len(train) // settings.global_batch_size)
    total = settings.max_steps or math.ceil(settings.num_train_epochs * steps_per_epoch)
    sizes = settings.global_batch_size, settings.micro_batch_size
    accumulation = accumulation_of(train, *sizes, processes, max_tokens)
    largest = -(-settings.global_batch_size // (accumulation * processes))
    return Schedule(
        steps_per_epoch, total, accumulation, largest, settings.eval_every or steps_per_epoch
    )


@dataclass
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int
    epoch: float
    loss: float
    """Mean over the global batch's samples, or their target tokens."""
    learning_rate: float
    grad_norm: float
    """The norm before clipping."""
    samples: int
    tokens: int
    """Tokens of this step, without padding."""
    samples_per_second: float
    tokens_per_second: float
    padding: float
    """Fraction of padding among all computed tokens."""
    peak_memory_bytes: int
    """Maximum over processes since the start or the last evaluation: device memory, or resident memory on a CPU."""


@dataclass
class Step:
    """One optimizer step on a global batch."""

    steps: Steps
    number: int
    """Counted from 1."""
    indices: np.ndarray
    """Samples of the global batch."""
    tokens: int
    """Tokens of the global batch, without padding."""
    loss_denominator: float
    """Divides the sum of the global batch's losses: its samples, the sum of their weights, or its target tokens."""
    collate: Collator
    learning_rate: float = math.nan
    next_step: Step | None = None
    started: float = 0.0
    seconds: float = math.nan
    grad_norm: Any = None
    metrics: StepMetrics = field(init=False)
    """Set when they are gathered."""
    _batch: Batch | None = None
    _computed_tokens: int = 0
    """Tokens that this process has computed, with padding."""
    _losses: list[torch.Tensor] = field(default_factory=list)
    _ids: list[torch.Tensor] = field(default_factory=list)

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is due after this step: after every `eval_every`, and after the last."""
        schedule = self.steps.schedule
        return self.number % schedule.eval_every == 0 or self.number == schedule.total_steps

    @cached_property
    def collations(self) -> list[partial[Batch]]:
        """Calls that make this process's micro-batches."""
        accelerator, settings = self.steps.accelerator, self.steps.settings
        rank, world = accelerator.process_index, accelerator.num_processes
        size, max_tokens = settings.micro_batch_size, settings.max_tokens_per_batch
        samples = micro_batches(self.steps.train, self.indices, size, rank, world, max_tokens)
        return [partial(self.collate, indices) for indices in samples]

    def micro_batches(self, model: torch.nn.Module) -> Iterator[Batch]:
        """Yields this process's micro-batches. The gradients of `model` are synchronised in the last one, or in each
        with `sync_each_batch`. Raises UserError if `requires_grad` of a parameter has changed."""
        accelerator, sync_each_batch = self.steps.accelerator, self.steps.settings.sync_each_batch
        if sync_each_batch is None:
            sync_each_batch = accelerator.is_fsdp2
        self.steps.model, checks = model, self.steps.checks
        model.train()
        checks.begin_step(self.number, model)
        self._losses, self._ids, self._computed_tokens = (
            [],
            [],
            0,
        )  # only the last of two passes counts
        prefetched = [
            *self.collations[1:],
            self.next_step.collations[0] if self.next_step else None,
        ]
        for collation, prefetch in zip(self.collations, prefetched, strict=True):
            accelerator.sync_gradients = collation is self.collations[-1]
            self._batch = self.steps.prefetcher.batch(collation, prefetch)
            self._computed_tokens += self._batch.inputs["input_ids"].numel()
            launch.explain_failures(partial(_explanation, self._batch, model))
            reduces = accelerator.sync_gradients or sync_each_batch
            with contextlib.nullcontext() if reduces else accelerator.no_sync(model):
                yield self._batch
        launch.explain_failures(memory.explain_without_batch)  # in the optimizer's step

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """(B,) losses of the current micro-batch -> its share, a scalar, of the mean over the global batch.

        Pass it to `accelerator.backward`. Where a sample's loss is a sum over tokens, the mean is over all tokens. Data
        parallel training averages gradients over processes, and accelerate (or DeepSpeed) over the declared
        accumulation: the factor cancels both, which leaves the division by the global loss denominator.

        Raises UserError outside `micro_batches`, and unless there is one loss per sample.
        """
        batch, accelerator = self._batch, self.steps.accelerator
        if batch is None:
            raise UserError("call step.mean() inside `for batch in step.micro_batches(model)`")
        checks = self.steps.checks
        checks.check_losses(losses, len(batch.weights))
        weighted = (
            losses * batch.weights
        )  # (B,); weights: 1, or the class's; 0 for a padding sample
        self._losses.append(weighted.detach())
        self._ids.append(batch.ids)
        averaged_over, plugin = (
            accelerator.gradient_accumulation_steps,
            accelerator.state.deepspeed_plugin,
        )
        if plugin is not None:  # as it was when the engine was created
            averaged_over = plugin.deepspeed_config["gradient_accumulation_steps"]
        factor = accelerator.num_processes * averaged_over / self.loss_denominator
        mean_loss = weighted.sum() * factor
        checks.expect_backward(mean_loss)
        return mean_loss

    def refuse_non_finite(self) -> None:
        """Raises UserError, in every process, when the gathered loss or gradient norm is not finite. fp16 skips steps
        with such gradients: there only too many in a row raise."""
        metrics, steps = self.metrics, self.steps
        steps.skipped = 0 if math.isfinite(metrics.grad_norm) else steps.skipped + 1
        allowed = _MAX_SKIPPED if steps.accelerator.mixed_precision == "fp16" else 0
        if math.isfinite(metrics.loss) and steps.skipped <= allowed:
            return
        if self.grad_norm is None and math.isfinite(metrics.loss):
            remedy = "keep `grad_norm = accelerator.clip_grad_norm_(...)`, which clips nothing with --max_grad_norm 0"
            raise UserError(
                f"step {metrics.step}: run.after() got None for the gradient's norm: {remedy}"
            )
        losses, ids = torch.cat(self._losses), torch.cat(self._ids)
        rows = [
            row for row in sorted(gather_object(ids[~torch.isfinite(losses)].tolist())) if row >= 0
        ]
        what = (
            f"the loss of rows {listing(row + 1 for row in rows)} is" if rows else "the gradient is"
        )
        raise UserError(
            f"step {metrics.step}: {what} not finite (loss {metrics.loss}, gradient norm {metrics.grad_norm}): check "
            f"those texts and labels, lower --learning_rate (now {metrics.learning_rate:.3g}), or use "
            "--mixed_precision bf16 or no"
        )


def _explanation(batch: Batch, model: torch.nn.Module, error: Exception) -> str | None:
    """The line for a failure in a micro-batch; None for one that has no known cause."""
    if "did not receive grad" in str(error):  # DDP's, in the step after the first
        places = (
            re.split(r"did not receive grad for rank \d+:", str(error))[-1].split("\n")[0].split()
        )
        trained = [name for name, each in unwrapped(model).named_parameters() if each.requires_grad]
        unused = listing([trained[int(place)] for place in places], 4)
        return f"the loss does not use {unused}, which is trained: leave it out of the model, or freeze it"
    if "already been lazily initialized" in str(error):  # FSDP2's
        why = "under FSDP2 the model's parts (its word embeddings, say) can be called only in its own forward"
        return f"{why}: make your change there, in your own model class, or launch with ddp (accelerate_configs/)"
    if "backward through the graph a second time" in str(error):
        return "the loss uses outputs of an earlier micro-batch: `.detach()` them"
    types = sorted({str(each.dtype) for each in model.parameters()})
    if len(types) > 1 and ("same dtype" in str(error) or "mixed dtype" in str(error)):
        how = "pass --mixed_precision bf16, or load all of them with dtype=torch.float32"
        return f"the model's weights are {listing(types)}: {how} [{first_line(error)}]"
    if "scatter(): Expected self.dtype" in str(error):
        return "transformers' BigBird attention has no 16 bits: leave out --attn_implementation eager, or pass " \
               "--mixed_precision no"  # fmt: skip
    if "must be 2-D" in str(error):  # ZeRO-3's empty parameter in an embedding
        remedy = "load it within `toolkit.whole_weights()` (docs/your-own-recipe.md, Another model class)"
        return f"a model was sharded when it was loaded, and not prepared: {remedy}"
    recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return memory.explain(batch, recomputes, error)


def peak_memory_bytes(device: torch.device) -> int:
    """Device memory if the device reports it, otherwise the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return memory.peak_resident_bytes()


def reset_peak_memory(device: torch.device) -> None:
    """Resets the peak on CUDA, and on a CPU under Linux (proc(5))."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):  # some sandboxes lack this file
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Steps:
    """Iterates over the optimizer steps of a run; the order of samples does not depend on the processes."""

    def __init__(
        self, accelerator: Accelerator, train: Split, tokenizer: Any, settings: TrainingSettings
    ) -> None:
        """Raises UserError if a text is longer than `max_tokens_per_batch`."""
        self.accelerator, self.train, self.settings = accelerator, train, settings
        self.schedule = make_schedule(settings, train, accelerator.num_processes)
        if accelerator.device.type == "cpu":
            install_fast_dropout()
        self.prefetcher = Prefetcher(accelerator.device)
        self.collate = collator_of(train, tokenizer, accelerator.device)
        self.done = 0
        """Steps taken, with those whose update fp16 skipped."""
        self.skipped = 0
        """How many steps in a row, up to the last, had a gradient that was not finite."""
        self.stop_signal = 0
        """Number of a stop signal (SIGTERM, SIGUSR1, Ctrl-C) that any process received, or 0."""
        self.signals = StopSignals(accelerator.is_main_process)
        self.checks = LoopChecks()
        self.model: Any = None
        """Prepared; set by the first step."""
        self.set_randomness: Callable[[], None] = self._seed_dropout
        self._pending: list[Step] = []
        self._steps_per_gather, self._seconds_per_step = settings.logging_steps or 1, math.inf

    def _seed_dropout(self) -> None:
        """Seeds dropout by process and by the steps of a resumed run; the weights have been initialized before."""
        seed = (
            self.settings.seed + int(os.environ.get(OTHER_RANDOMNESS) or 0) + 1_000_003 * self.done
        )
        set_seed(seed % 2**31, device_specific=True)

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps after `done`, with the order of samples by seed and epoch. Stop signals only set
        `stop_signal` meanwhile."""
        self.set_randomness()
        device = self.accelerator.device
        reset_peak_memory(device)  # exclude data, a teacher, and the search for a batch size
        with self.signals:
            remaining = self._remaining()
            step = next(remaining, None)
            while step is not None:
                step.next_step, step.started = next(remaining, None), time.perf_counter()
                yield step
                if step.evaluates:
                    reset_peak_memory(device)
                step = step.next_step

    def _remaining(self) -> Iterator[Step]:
        per_epoch, train, settings = self.schedule.steps_per_epoch, self.train, self.settings
        steps = range(self.done, self.schedule.total_steps)
        for epoch, numbers in itertools.groupby(steps, lambda number: number // per_epoch):
            size, by_length = settings.global_batch_size, settings.group_by_length
            order = GlobalBatches(
                train.lengths, size, settings.seed, epoch, by_length, train.sampling_probabilities
            )
            for number in numbers:
                indices = order[number % per_epoch]
                collate = self.collate.at(epoch, number / max(1, self.schedule.total_steps - 1))
                tokens, denominator = (
                    train.lengths[indices].sum(),
                    collate.loss_denominators(indices).sum(),
                )
                # 1 if no text has a target token: their loss is 0
                yield Step(self, number + 1, indices, int(tokens), denominator.item() or 1, collate)

    def finish(self, step: Step, grad_norm: Any) -> Iterator[StepMetrics]:
        """Yields the metrics of this step and of earlier steps, or nothing until the next gather (`logging_steps`).
        Gathering synchronises the device, and shares a stop signal with all processes; all of them call this.

        Raises UserError, in every process, for the first step whose loss or gradient is not finite, and for a step
        whose losses did not all pass `Step.mean` once.
        """
        self.checks.end_step(step.number, len(step.collations))
        self._broadcast_buffers()
        step.grad_norm, step.seconds, step._batch = (
            grad_norm,
            time.perf_counter() - step.started,
            None,
        )
        if self.accelerator.device.type == "cpu":
            memory.manage_freed_memory()
        self.done, signal = step.number, self.signals.requested
        self._pending.append(step)
        saves = (
            self.settings.checkpoint_every is not None
            and step.number % self.settings.checkpoint_every == 0
        )
        if len(self._pending) < self._steps_per_gather and not step.evaluates and not saves:
            return
        yield from self.flush(signal)

    def flush(self, signal: int = 0) -> Iterator[StepMetrics]:
        """Yields the metrics of the steps since the last gather, as `finish`; all processes call this."""
        finished, self._pending = self._pending, []
        if finished:
            self._gather(finished, signal)
        for each in finished:
            each.refuse_non_finite()
            yield each.metrics

    def _gather(self, finished: list[Step], signal: int) -> None:
        """Gathers any number of steps by one small collective and one copy to the host."""
        device, count, start = self.accelerator.device, len(finished), time.perf_counter()
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        computed = [step._computed_tokens for step in finished]
        numbers = [peak_memory_bytes(device), signal, self._seconds_per_step, *computed]
        sums = [
            torch.stack([loss.sum(dtype=dtype) for loss in step._losses]).sum() for step in finished
        ]
        norms = [_norm_tensor(step.grad_norm).to(device, dtype) for step in finished]
        results = torch.stack([*sums, *norms, self._sample_weights(dtype)])
        local = torch.cat([torch.tensor(numbers, dtype=dtype, device=device), results])
        ranks = self.accelerator.gather(local[None]).tolist()  # (processes, 4 + 3 steps)
        launch.explain_failures()  # later failures are not a micro-batch's
        if any(abs(rank[-1] - ranks[0][-1]) > 1e-5 * abs(ranks[0][-1]) for rank in ranks):
            raise UserError(
                f"step {finished[-1].number}: weights differ between processes: use each trained parameter in each "
                "micro-batch, and draw random numbers of an update from a torch.Generator with one seed"
            )
        peak, self.stop_signal = (int(max(rank[place] for rank in ranks)) for place in (0, 1))
        if self.settings.logging_steps is None and device.type != "cpu":
            self._steps_per_gather = max(1, int(_GATHER_SECONDS / ranks[0][2]))
        seconds = time.perf_counter() - start + sum(step.seconds for step in finished)
        self._seconds_per_step = seconds / count
        samples, tokens = (
            sum(len(step.indices) for step in finished),
            sum(step.tokens for step in finished),
        )
        for place, step in enumerate(finished, 3):
            step.metrics = StepMetrics(
                step=step.number,
                epoch=round(step.number / self.schedule.steps_per_epoch, 4),
                loss=math.fsum(rank[place + count] for rank in ranks) / step.loss_denominator,
                learning_rate=step.learning_rate,
                grad_norm=ranks[0][place + 2 * count],
                samples=len(step.indices),
                tokens=step.tokens,
                samples_per_second=round(samples / seconds, 2),
                tokens_per_second=round(tokens / seconds, 1),
                padding=round(1 - step.tokens / sum(rank[place] for rank in ranks), 4),
                peak_memory_bytes=peak,
            )

    def _broadcast_buffers(self) -> None:
        """Broadcasts rank 0's running means (BatchNorm's), as DDP does: otherwise each would evaluate with
        other ones."""
        accelerator = self.accelerator
        if accelerator.num_processes > 1 and (
            accelerator.state.deepspeed_plugin or accelerator.is_fsdp2
        ):
            for _, buffer in floating_buffers(unwrapped(self.model)):
                torch.distributed.broadcast(buffer, 0)

    def _sample_weights(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum of the trained parameters' first elements: equal on all ranks under DDP. 0 otherwise."""
        replicated = isinstance(self.model, torch.nn.parallel.DistributedDataParallel)
        parameters = self.model.parameters() if replicated else ()
        first = [
            each.detach().flatten()[0] for each in parameters if each.requires_grad and each.numel()
        ]
        first = first or [torch.zeros((), device=self.accelerator.device)]
        return torch.stack(first).to(dtype).abs().sum()


def _norm_tensor(norm: Any) -> torch.Tensor:
    """A scalar, from the gradient norms that strategies return: a tensor, a DTensor, a float or None."""
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return torch.as_tensor(math.nan if whole is None else whole).detach().reshape(())
