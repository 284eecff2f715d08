"""Prepares a model and its optimizer for the training loop."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler

from toolkit.config import TrainingSettings
from toolkit.data.batches import collator_of
from toolkit.data.tokens import Split
from toolkit.training.coalesce import coalesce_reductions
from toolkit.training.estimate import fit_batch_size
from toolkit.training.optimizer import make_scheduler
from toolkit.training.steps import Steps
from toolkit.training.strategy import align_strategy


def prepare(
    accelerator: Accelerator, settings: TrainingSettings, model: Any, optimizer: Any, train: Split, tokenizer: Any
) -> tuple[Any, Any, AcceleratedScheduler, Steps]:
    """(model, optimizer, scheduler, steps), prepared for the strategy of this launch; all processes call this.

    Replaces `--per_device_batch_size auto` by a number (in `steps.settings`) first: the strategy's config needs the
    number of micro-batches before `accelerator.prepare`. The schedule is not prepared, since accelerate would step it
    once per process. Raises UserError for settings, a model or an optimizer that the strategy cannot train.
    """
    collator_of(train, tokenizer, accelerator.device).prepare_model(accelerator, model)
    settings = fit_batch_size(accelerator, model, train, tokenizer, settings)
    steps = Steps(accelerator, train, tokenizer, settings)
    align_strategy(accelerator, model, optimizer, settings, steps.schedule)
    model, optimizer = accelerator.prepare(model, optimizer)
    coalesce_reductions(accelerator, settings)
    return model, optimizer, make_scheduler(optimizer, settings, steps.schedule.total_steps), steps
