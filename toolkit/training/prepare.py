"""Prepares a model and its optimizer for the strategy of this launch: copied, or sharded."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from toolkit import launch
from toolkit.checkpoint.model_folder import check_adapter
from toolkit.checkpoint.parameters import floating_buffers, persistent_buffers
from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.models.layers import outer_layers
from toolkit.pretrained import encoder_config
from toolkit.training.checks import check_before_prepare
from toolkit.training.fsdp import prepare_fsdp
from toolkit.training.precision import reduction_dtype
from toolkit.utils import memory

# of one layer: training or evaluation, with or without a mask, one text or several
_MAX_GRAPHS = 32


def prepare_for_strategy(
    accelerator: Accelerator,
    settings: TrainingSettings,
    accumulation: int,
    model: Any,
    optimizer: Any,
) -> tuple[Any, Any]:
    """(model, optimizer), prepared for steps of at most `accumulation` micro-batches; all processes
    call this. Raises UserError for a model, an optimizer or a config that the strategy cannot
    train."""
    check_before_prepare(accelerator, model, optimizer)
    check_adapter(model)
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        fault = (
            f"dynamo_backend: {backend.value} in the accelerate config renames the weights"
        )
        raise UserError(f"{fault}: remove it, and pass --torch_compile true")
    _make_contiguous(model)
    if settings.torch_compile:
        compile_layers(accelerator, model)
    # an upper bound does: `Step.mean` multiplies by what accelerate and DeepSpeed divide by. But 1
    # must be exact: DeepSpeed then accumulates no gradients
    accelerator.gradient_accumulation_steps = accumulation
    # the schedule would count a step that a fused kernel skips
    if accelerator.scaler is not None:
        optimizer._step_supports_amp_scaling = False
    launch.exit_state.explain = memory.explain_without_batch
    if accelerator.state.deepspeed_plugin:
        from toolkit.training.zero import prepare_zero  # imports DeepSpeed

        prepared = prepare_zero(accelerator, settings, model, optimizer)
    elif accelerator.is_fsdp2:
        prepared = prepare_fsdp(accelerator, settings, model, optimizer)
    else:
        prepared = _prepare_copies(accelerator, settings, model, optimizer)
    launch.exit_state.explain = None
    return prepared


def _make_contiguous(model: torch.nn.Module) -> None:
    """Checkpoints, ZeRO and FSDP2 take a tensor's elements in a row."""
    buffers = [buffer for _, buffer in persistent_buffers(model)]
    for tensor in (*model.parameters(), *buffers):
        tensor.data = tensor.data.contiguous()


def _prepare_copies(
    accelerator: Accelerator,
    settings: TrainingSettings,
    model: Any,
    optimizer: Any,
) -> tuple[Any, Any]:
    """For one process, or DDP."""
    if accelerator.ddp_handler is not None:
        # broadcast running means, but not constants, in each step
        accelerator.ddp_handler.broadcast_buffers = any(floating_buffers(model))
    model, optimizer = accelerator.prepare(model, optimizer)
    dtype = reduction_dtype(accelerator, settings)
    if dtype:
        compress = getattr(default_hooks, f"{dtype}_compress_hook")
        # by another name: without NCCL torch rejects its bf16 hook
        model.register_comm_hook(None, lambda state, bucket: compress(state, bucket))
    return model, optimizer


def compile_layers(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Compiles each layer in place: the names of parameters do not change, and layers share their
    code. Graphs are dynamic in the number of texts and tokens. Raises UserError for models and
    strategies that this does not suit."""
    plugin, config = accelerator.state.deepspeed_plugin, getattr(model, "config", None)
    why = ""
    if plugin is not None and plugin.zero_stage == 3:
        why = "ZeRO-3 gathers each weight in a hook, which breaks the graph: launch with zero2.yaml"
    elif getattr(config, "is_encoder_decoder", False):
        why = f"the key-value cache of a {type(model).__name__} grows with each token of a title"
    elif getattr(encoder_config(config), "attention_type", "") == "block_sparse":
        why = "BigBird's sparse attention has different blocks for each length"
    if why:
        raise UserError(f"--torch_compile cannot be used: {why}; or leave it out")
    # it would cut each layer in two or more graphs, to reduce gradients earlier; a layer is a graph
    # of its own already
    torch._dynamo.config.optimize_ddp = False
    for layer in outer_layers(model):
        layer.compile(dynamic=True, recompile_limit=_MAX_GRAPHS)
