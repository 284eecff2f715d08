"""bf16 and fp16 under ZeRO and FSDP2, with gradients as close to fp32's as in one process.

By default DeepSpeed rounds the weights to 16 bits, copies its fp32 masters from the rounded ones, and computes the
residual stream, accumulates and reduces in 16 bits; so does accelerate with FSDP2, except for the masters. Here both
get a model in fp32 whose forward pass runs under torch's autocast, as `Accelerator.prepare` does for DDP.
`half_precision_weights` keeps their default, for less memory and traffic, with masters from the unrounded weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    convert_outputs_to_fp32,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy

from toolkit.checkpoint.safetensors_writer import DTYPES
from toolkit.checkpoint.strategies import live_state
from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.launch import log_on_main
from toolkit.launch.precision import autocast, enabled_in_deepspeed_config
from toolkit.utils.compat import require


def choose_precision(
    accelerator: Accelerator, model: torch.nn.Module, settings: TrainingSettings
) -> None:
    """Makes the next `accelerator.prepare` shard a model that computes in this run's precision. Raises UserError if
    DeepSpeed does not support weights in fp16."""
    half, zero = settings.half_precision_weights, accelerator.state.deepspeed_plugin
    if half and (accelerator.mixed_precision == "no" or not (zero or accelerator.is_fsdp2)):
        why = "in an fp32 run" if zero or accelerator.is_fsdp2 else "without ZeRO or FSDP2"
        log_on_main(
            accelerator, f"half_precision_weights: {why} weights and reductions stay in fp32"
        )
    if accelerator.mixed_precision == "no":
        return
    if zero:
        half = half or enabled_in_deepspeed_config() is not None
        if half and accelerator.mixed_precision == "fp16":
            _refuse_unsupported_fp16()
        _wrap_next_prepare(accelerator, model, _restore_masters if half else _prepare_in_fp32)
    elif accelerator.is_fsdp2 and not half:
        _add_autocast(accelerator, model)
        # gathering weights in 16 bits would double the error of one process
        accelerator.state.fsdp_plugin.mixed_precision_policy = None


def choose_reduction(accelerator: Accelerator, settings: TrainingSettings) -> str | None:
    """With `--half_precision_gradients` makes the next `accelerator.prepare` reduce gradients in 16 bits. Returns that
    type for the DeepSpeed config, or None."""
    if not settings.half_precision_gradients or accelerator.num_processes == 1:
        return None
    name = "fp16" if accelerator.mixed_precision == "fp16" else "bf16"
    if accelerator.is_fsdp2:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = accelerator.state.fsdp_plugin.mixed_precision_policy or MixedPrecisionPolicy()
        accelerator.state.fsdp_plugin.mixed_precision_policy = replace(
            policy, reduce_dtype=DTYPES[name]
        )
    elif accelerator.state.deepspeed_plugin is None:
        options = {**vars(accelerator.ddp_handler), "comm_hook": DDPCommunicationHookType(name)}
        accelerator.ddp_handler = _HalfPrecisionReduction(**options)
    return name


class _HalfPrecisionReduction(DistributedDataParallelKwargs):
    """Registers the hook under another name: without NCCL torch rejects its bf16 hook by name."""

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        hook = getattr(default_hooks, f"{self.comm_hook.value}_compress_hook")
        model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))


def _refuse_unsupported_fp16() -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        raise UserError(
            "DeepSpeed does not support weights in fp16 on this device: leave --half_precision_weights out, or pass "
            '--mixed_precision bf16; in the DeepSpeed config write "enabled": "auto"'
        )


def _wrap_next_prepare(
    accelerator: Accelerator, model: torch.nn.Module, context: Callable[..., Any]
) -> None:
    prepare = accelerator.prepare

    def prepare_wrapped(*objects: Any, **options: Any) -> Any:
        accelerator.prepare = prepare
        with context(accelerator, model):
            return prepare(*objects, **options)

    accelerator.prepare = prepare_wrapped


@contextlib.contextmanager
def _prepare_in_fp32(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[None]:
    """Creates DeepSpeed's engine in fp32, without changing accelerate's precision. fp16 gets DeepSpeed's loss scaler,
    which skips the same steps on every rank; that of its `torch_autocast` section (0.19.8) never lowers the scale."""
    precision = accelerator.mixed_precision
    section = accelerator.state.deepspeed_plugin.deepspeed_config[precision]
    _add_autocast(accelerator, model)
    accelerator.autocast = partial(autocast, accelerator)  # for evaluations of recipes
    if accelerator.state.deepspeed_plugin.zero_stage == 3:
        from deepspeed.runtime.zero import linear

        # DeepSpeed's adds the bias to a rounded product: the error of losses is 1.7 times as large
        require(linear, "LinearFunctionForZeroStage3.forward", "deepspeed")
        linear.LinearFunctionForZeroStage3.forward = staticmethod(_linear)
    section["enabled"] = False
    try:
        yield
    finally:
        section["enabled"] = True
    if precision == "fp16":
        from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

        engine = accelerator.deepspeed_engine_wrapped.engine
        for name in ("loss_scaler", "dynamic_loss_scale"):
            require(engine.optimizer, name, "deepspeed")
        engine.optimizer.loss_scaler = scaler = CreateLossScaler(
            torch.float16,
            engine.loss_scale(),
            engine.dynamic_loss_scale(),
            engine.dynamic_loss_scale_args(),
        )
        engine.optimizer.dynamic_loss_scale = scaler.dynamic
        scaler.raise_error_at_min_scale = (
            False  # `Step.refuse_non_finite` reports too many skipped steps
        )
        _raise_scale_after_step(engine.optimizer)


def _raise_scale_after_step(optimizer: Any) -> None:
    """DeepSpeed 0.19.8 raises fp16's loss scale in the middle of a step, and divides that step's gradients by the new
    one: they are halved."""
    update, original_step = require(optimizer, "_update_scale", "deepspeed"), optimizer.step

    def step(*arguments: Any, **options: Any) -> None:
        original_step(*arguments, **options)
        if not optimizer.overflow:
            update(False)

    optimizer._update_scale = lambda has_overflow=False: update(True) if has_overflow else None
    optimizer.step = step


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    output = torch.ops.aten.linear(input, weight, bias)
    # a view that a custom Function returns may not be modified in place, as Longformer does
    return torch.ops.aten._unsafe_view(output, output.shape)


def _add_autocast(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Wraps forward as `Accelerator.prepare_model` does; bound, so that a copy of the model calls its own forward."""
    function: Callable[..., Any] | None = getattr(model.forward, "__func__", None)
    forward = convert_outputs_to_fp32(autocast(accelerator)(function or model.forward))
    model.forward = MethodType(forward, model) if function else forward


@contextlib.contextmanager
def _restore_masters(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[None]:
    """Copies the unrounded weights into DeepSpeed's fp32 masters, which it has copied from rounded ones."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    yield
    for fragment in live_state(accelerator, accelerator.deepspeed_engine_wrapped.engine).weights():
        if (weight := weights.get(fragment.name)) is not None:
            fragment.values.copy_(
                weight.reshape(-1)[fragment.start : fragment.start + fragment.values.numel()]
            )
    if accelerator.mixed_precision == "fp16":
        _raise_scale_after_step(accelerator.deepspeed_engine_wrapped.engine.optimizer)


_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def keep_scale_with_gradients(accelerator: Accelerator) -> None:
    """Creates fp16's loss scale on the CPU if FSDP2 has gradients there: torch would copy it for each check for
    infinities, and read it before the copy is done."""
    if accelerator.is_fsdp2 and isinstance(
        accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy
    ):
        accelerator.scaler.scale(torch.ones(()))


def scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any] | None:
    """The state of fp16's loss scale; None if none is used."""
    scaler = _deepspeed_scaler(optimizer)
    if scaler is not None:
        return {name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)}
    if accelerator.scaler is None:
        return None
    state = accelerator.scaler.state_dict()
    return {"cur_scale": state["scale"], "torch": state} if state else None


def set_scaler(accelerator: Accelerator, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Restores the state of fp16's loss scale; under another strategy only the scale, and the rest adapts."""
    scaler = _deepspeed_scaler(optimizer)
    if state is None or not math.isfinite(state["cur_scale"]):
        return
    if scaler is not None:
        vars(scaler).update({name: state[name] for name in _SCALER_FIELDS if name in state})
    elif accelerator.scaler is not None:
        saved = state.get("torch") or {
            **accelerator.scaler.state_dict(),
            "scale": state["cur_scale"],
        }
        accelerator.scaler.load_state_dict(saved)


def _deepspeed_scaler(optimizer: Any) -> Any:
    """None if the scale is constant: in fp32 and bf16 it is 1."""
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None
