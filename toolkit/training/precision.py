"""bf16 and fp16 with gradients as close to fp32's under every strategy as in one process.

By default DeepSpeed rounds the weights to 16 bits, copies its fp32 masters from the rounded ones,
and computes the residual stream, accumulates and reduces in 16 bits; so does accelerate with FSDP2,
except for the masters. Here both get a model in fp32 whose forward pass runs under torch's
autocast, as `Accelerator.prepare` does for DDP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32

from toolkit.config import TrainingSettings
from toolkit.launch.precision import autocast

_SCALER_FIELDS = (
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "cur_hysteresis",
    "was_stable",
)


def add_autocast(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Wraps forward as `Accelerator.prepare_model` does; bound, so that a copy of the model calls
    its own forward."""
    if accelerator.mixed_precision == "no":
        return
    function: Callable[..., Any] | None = getattr(model.forward, "__func__", None)
    forward = convert_outputs_to_fp32(autocast(accelerator)(function or model.forward))
    model.forward = MethodType(forward, model) if function else forward


def reduction_dtype(accelerator: Accelerator, settings: TrainingSettings) -> str | None:
    """bf16 or fp16, in which gradients are reduced with `--half_precision_gradients`; else None."""
    if not settings.half_precision_gradients or accelerator.num_processes == 1:
        return None
    return "fp16" if accelerator.mixed_precision == "fp16" else "bf16"


def scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any] | None:
    """The state of fp16's loss scale; None if none is used."""
    scaler = _deepspeed_scaler(optimizer)
    if scaler is not None:
        return {
            name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)
        }
    if accelerator.scaler is None:
        return None
    state = accelerator.scaler.state_dict()
    return {"cur_scale": state["scale"], "torch": state} if state else None


def set_scaler(
    accelerator: Accelerator, optimizer: Any, state: Mapping[str, Any] | None
) -> None:
    """Restores the state of fp16's loss scale; under another strategy only the scale, and the rest
    adapts."""
    scaler = _deepspeed_scaler(optimizer)
    if state is None or not math.isfinite(state["cur_scale"]):
        return
    if scaler is not None:
        vars(scaler).update({name: state[name] for name in _SCALER_FIELDS if name in state})
    elif accelerator.scaler is not None:
        present = {**accelerator.scaler.state_dict(), "scale": state["cur_scale"]}
        accelerator.scaler.load_state_dict(state.get("torch") or present)


def _deepspeed_scaler(optimizer: Any) -> Any:
    """None if the scale is constant: in fp32 and bf16 it is 1."""
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None
