"""ZeRO-2 and ZeRO-3 reduce gradients once per optimizer step, as DDP does, and not after each micro-batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.config import TrainingSettings
from toolkit.utils.compat import require


def coalesce_reductions(accelerator: Accelerator, settings: TrainingSettings) -> None:
    """Until a step's last micro-batch, gradients add up in each process: whole ones, 4 bytes per trained parameter.
    Called after `accelerator.prepare`.

    Not with weights in 16 bits, in which they would add up: each micro-batch's are reduced into fp32 shards there.
    ZeRO-1 reduces once by itself. DeepSpeed's pull request 7992.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None or plugin.zero_stage < 2 or settings.sync_each_batch or _has_half_precision_weights(accelerator):
        return
    wrapper, block = accelerator.deepspeed_engine_wrapped, contextlib.ExitStack()
    engine = wrapper.engine

    def backward(loss: torch.Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """`DeepSpeedEngineWrapper.backward`, with the micro-batches of a step in one block of DeepSpeed's."""
        if not sync_gradients and not engine.inside_no_sync_ctxt:
            block.enter_context(engine.coalesce_grad_reduction())
        engine.set_gradient_accumulation_boundary(sync_gradients)
        engine.backward(loss, **options)
        if sync_gradients:
            block.close()  # reduces
            engine.set_gradient_accumulation_boundary(True)  # leaving a block restores what it was before
            engine.step()

    require(wrapper, "backward", "accelerate")
    require(engine, "coalesce_grad_reduction", "deepspeed")
    wrapper.backward = backward


def _has_half_precision_weights(accelerator: Accelerator) -> bool:
    engine = accelerator.deepspeed_engine_wrapped.engine
    return any(parameter.dtype != torch.float32 for parameter in engine.module.parameters() if parameter.requires_grad)
