"""The optimizer steps of a run, and their micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.config import TrainingSettings
from toolkit.data.batches import micro_batch_samples
from toolkit.data.tokens import Split
from toolkit.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of a run."""

    steps_per_epoch: int
    total_steps: int
    eval_every: int


def make_schedule(settings: TrainingSettings, train: Split) -> Schedule:
    steps_per_epoch = math.ceil(len(train) / settings.global_batch_size)
    total_steps = settings.max_steps or math.ceil(
        settings.num_train_epochs * steps_per_epoch
    )
    return Schedule(steps_per_epoch, total_steps, settings.eval_every or steps_per_epoch)


def max_micro_batches(settings: TrainingSettings, train: Split, processes: int) -> int:
    """Of one optimizer step on one process. Raises UserError if a text is longer than
    `max_tokens_per_batch`."""
    longest = int(train.lengths.max())
    max_tokens = settings.max_tokens_per_batch
    if max_tokens is not None and longest > max_tokens:
        fault = f"less than the longest text, which has {longest} tokens"
        remedy = f"raise it, or truncate texts with --max_length {max_tokens}"
        raise UserError(f"--max_tokens_per_batch {max_tokens} is {fault}: {remedy}")
    fewest = micro_batch_samples(longest, settings.micro_batch_size, max_tokens)
    if train.buckets is not None:  # each text may be of another
        fewest = 1
    return math.ceil(settings.global_batch_size / (fewest * processes))
