"""ZeRO-2 and ZeRO-3 reduce gradients once per optimizer step, as DDP does, and not after each micro-batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

from toolkit.config import TrainingSettings
from toolkit.launch.precision import enabled_in_deepspeed_config
from toolkit.utils.compat import require


def coalesce_reductions(accelerator: Accelerator, settings: TrainingSettings) -> None:
    """Until a step's last micro-batch, gradients add up in each process: whole ones, 4 bytes per trained parameter.

    Not with weights in 16 bits, in which they would add up: each micro-batch's are reduced into fp32 shards there.
    ZeRO-1 reduces once by itself. DeepSpeed's pull request 7992.
    """
    half = accelerator.mixed_precision != "no" and (
        settings.half_precision_weights or enabled_in_deepspeed_config() is not None
    )
    if accelerator.state.deepspeed_plugin.zero_stage < 2 or settings.sync_each_batch or half:
        return
    require(DeepSpeedEngineWrapper, "backward", "accelerate")
    block = contextlib.ExitStack()

    def backward(wrapper: Any, loss: torch.Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """`DeepSpeedEngineWrapper.backward`, with the micro-batches of a step in one block of DeepSpeed's."""
        engine = wrapper.engine
        if not sync_gradients and not engine.inside_no_sync_ctxt:
            block.enter_context(engine.coalesce_grad_reduction())
        engine.set_gradient_accumulation_boundary(sync_gradients)
        engine.backward(loss, **options)
        if sync_gradients:
            block.close()  # reduces
            engine.set_gradient_accumulation_boundary(True)  # leaving a block restores what it was before
            engine.step()

    DeepSpeedEngineWrapper.backward = backward
