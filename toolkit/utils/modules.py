"""Unwraps modules that `Accelerator.prepare` has wrapped."""

from __future__ import annotations

import sys
from typing import Any

import torch


def unwrapped(model: Any) -> Any:
    """The module that `Accelerator.prepare` wrapped, without importing DeepSpeed (1.5 s) as `unwrap_model` does."""
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())
    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, engine)):
        model = model.module
    return model
