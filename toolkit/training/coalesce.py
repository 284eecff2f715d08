"""Makes ZeRO-2 and ZeRO-3 reduce gradients once per optimizer step, as DDP does, not after each micro-batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.config import TrainingSettings
from toolkit.utils.compat import require


def coalesce_reductions(accelerator: Accelerator, settings: TrainingSettings) -> None:
    """Call this after `accelerator.prepare`. Until a step's last micro-batch each process accumulates unsharded
    gradients, 4 bytes per trained parameter.

    Does nothing for 16-bit weights, whose gradients would accumulate in 16 bits (DeepSpeed reduces those of each
    micro-batch into fp32 shards), and for ZeRO-1, which reduces once anyway. See DeepSpeed's pull request 7992.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None or plugin.zero_stage < 2 or settings.sync_each_batch:
        return
    wrapper, block = accelerator.deepspeed_engine_wrapped, contextlib.ExitStack()
    engine = wrapper.engine
    if any(each.dtype != torch.float32 for each in engine.module.parameters() if each.requires_grad):
        return

    def backward(loss: torch.Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """`DeepSpeedEngineWrapper.backward`, with all micro-batches of a step in one `coalesce_grad_reduction`."""
        if not sync_gradients and not engine.inside_no_sync_ctxt:
            block.enter_context(engine.coalesce_grad_reduction())
        engine.set_gradient_accumulation_boundary(sync_gradients)
        engine.backward(loss, **options)
        if sync_gradients:
            block.close()  # reduces
            engine.set_gradient_accumulation_boundary(True)  # leaving the block has reset it
            engine.step()

    require(wrapper, "backward", "accelerate")
    require(engine, "coalesce_grad_reduction", "deepspeed")
    wrapper.backward = backward
