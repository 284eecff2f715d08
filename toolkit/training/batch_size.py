"""`--per_device_batch_size auto`: the largest micro-batch of the longest texts that the device can
train on."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from toolkit.config import TrainingSettings
from toolkit.data.batches import Collator, micro_batch_samples
from toolkit.errors import UserError
from toolkit.launch.precision import autocast
from toolkit.utils.log import log_on_rank_0
from toolkit.utils.memory import is_out_of_memory

Settings = TypeVar("Settings", bound=TrainingSettings)

# AdamW's two moments and a copy of the gradients, for each trained weight
_STATE_BYTES = 12


def fit_batch_size(
    accelerator: Accelerator,
    model: torch.nn.Module,
    collate: Collator,
    settings: Settings,
) -> Settings:
    """Replaces `auto` by a number, the same on all ranks; call it before `accelerator.prepare`. A
    CPU has no memory of its own to fill: there it is the process's share of the global batch.
    Raises UserError if not even one text fits."""
    if settings.per_device_batch_size != "auto":
        return settings
    size = math.ceil(settings.global_batch_size / accelerator.num_processes)
    if accelerator.device.type != "cpu":
        trial = copy.deepcopy(model).train()
        while size and not _fits(
            accelerator, trial, collate, settings.max_tokens_per_batch, size
        ):
            size //= 2
        del trial
        _free_memory()
        size = min(gather_object([size]))
    longest = int(collate.split.lengths.max())
    if size == 0:
        remedy = "pass --gradient_checkpointing true, or a smaller --max_length"
        fault = f"not even one text of {longest} tokens fits"
        raise UserError(f"--per_device_batch_size auto: {fault}: {remedy}")
    line = f"--per_device_batch_size auto: {size} (texts of up to {longest} tokens)"
    log_on_rank_0(line)
    return dataclasses.replace(settings, per_device_batch_size=size)


def _fits(
    accelerator: Accelerator,
    model: Any,
    collate: Collator,
    max_tokens: int | None,
    size: int,
) -> bool:
    """Whether a forward and a backward pass of the `size` longest texts, of at most `max_tokens`
    tokens together, fit beside the optimizer's state."""
    split, device = collate.split, accelerator.device
    size = micro_batch_samples(int(split.lengths.max()), size, max_tokens)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    model.zero_grad()
    _free_memory()
    try:
        model.to(device)
        reserved = torch.empty(_STATE_BYTES * trained, dtype=torch.uint8, device=device)
        longest = np.argsort(-split.lengths, kind="stable")[:size]
        batch = collate(longest)
        with autocast(accelerator):
            logits = model(**batch.inputs).logits
        logits.float().logsumexp(-1).mean().backward()
        del reserved
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
