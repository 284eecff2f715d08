"""What FSDP2 must be told: its units, its precision, and rank 0's weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from toolkit.checkpoint.model_folder import DTYPES
from toolkit.config import TrainingSettings
from toolkit.models.layers import outer_layers
from toolkit.training.precision import add_autocast, reduction_dtype


def prepare_fsdp(
    accelerator: Accelerator,
    settings: TrainingSettings,
    model: Any,
    optimizer: Any,
) -> tuple[Any, Any]:
    plugin = accelerator.state.fsdp_plugin
    _choose_units(plugin, model)
    _broadcast_weights(accelerator, model)
    add_autocast(accelerator, model)
    # gathering weights in 16 bits would double the error of one process
    plugin.mixed_precision_policy = None
    dtype = reduction_dtype(accelerator, settings)
    if dtype:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=DTYPES[dtype])
    if accelerator.scaler is not None and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        # creates the scale beside the gradients: torch would copy it for each check for
        # infinities, and read it before the copy is done
        accelerator.scaler.scale(torch.ones(()))
    prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer)
    return prepared


def _choose_units(plugin: Any, model: Any) -> None:
    """Makes FSDP2 gather one layer at a time. Accelerate's default, transformers'
    `_no_split_modules`, includes embeddings, or is empty (BigBird)."""
    layers = {type(layer).__name__ for layer in outer_layers(model)}
    plugin.transformer_cls_names_to_wrap = sorted(layers)
    # accelerate makes units of the embeddings and the head, too: a parameter with several names
    # (tied weights, a bias of BERT's head) would be in two units
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    for name in ("get_input_embeddings", "get_output_embeddings"):
        part = getattr(model, name, lambda: None)()
        if part is not None and any(uses[id(each)] > 1 for each in part.parameters()):
            setattr(model, name, lambda: None)


def _broadcast_weights(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Gives all ranks rank 0's weights, as DDP and ZeRO do."""
    if accelerator.num_processes == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        on_device = tensor.detach().to(accelerator.device)
        torch.distributed.broadcast(on_device, 0)
        tensor.data.copy_(on_device)
