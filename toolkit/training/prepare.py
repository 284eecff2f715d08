"""Everything between a model with its optimizer and the training loop, in the one order that works."""

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
    """(model, optimizer, scheduler, steps), as the launch asks for them; all processes call this.

    `--per_device_batch_size auto` becomes a number first (`steps.settings` has it): it decides how many micro-batches a
    step has, and the strategy's config must say that before `accelerator.prepare`. The schedule is not prepared, or it
    would step once per process. Raises UserError for settings, a model or an optimizer that the strategy cannot train.
    """
    collator_of(train, tokenizer, accelerator.device).prepare_model(accelerator, model)
    settings = fit_batch_size(accelerator, model, train, tokenizer, settings)
    steps = Steps(accelerator, train, tokenizer, settings)
    align_strategy(accelerator, model, optimizer, settings, steps.schedule)
    model, optimizer = accelerator.prepare(model, optimizer)
    coalesce_reductions(accelerator, settings)
    return model, optimizer, make_scheduler(optimizer, settings, steps.schedule.total_steps), steps
