"""Prepares a model and its optimizer for the training loop, where ZeRO reduces gradients once per step."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.batches import collator_of
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.launch.exit_state import exit_state
from toolkit.training.estimate import fit_batch_size
from toolkit.training.loop_checks import refuse_changes, refuse_different_weights, refuse_state_dict
from toolkit.training.optimizer import make_scheduler
from toolkit.training.steps import Steps
from toolkit.training.strategy import align_strategy, explain_config_errors
from toolkit.utils import memory
from toolkit.utils.compat import require


def prepare(
    accelerator: Accelerator, settings: TrainingSettings, model: Any, optimizer: Any, train: Split, tokenizer: Any
) -> tuple[Any, Any, AcceleratedScheduler, Steps]:
    """(model, optimizer, scheduler, steps), prepared for the strategy of this launch; all processes call this.

    First sets the tokens of a micro-batch, and replaces `--per_device_batch_size auto` by a number, in
    `steps.settings`: the strategy's config needs the number of micro-batches before `accelerator.prepare`. The schedule
    is not prepared, since accelerate would step it once per process. Raises UserError for settings, a model or an
    optimizer that the strategy cannot train.
    """
    collator_of(train, tokenizer, accelerator.device).prepare_model(accelerator, model)
    settings = settings.limit_tokens(accelerator.device.type, int(train.lengths.max()))
    settings = fit_batch_size(accelerator, model, train, tokenizer, settings)
    steps = Steps(accelerator, train, tokenizer, settings)
    align_strategy(accelerator, model, optimizer, settings, steps.schedule)
    if accelerator.is_fsdp2:
        refuse_different_weights(model)
    launch.explain_failures(memory.explain_without_batch)
    with explain_config_errors():
        model, optimizer = accelerator.prepare(model, optimizer)
    launch.explain_failures()
    coalesce_reductions(accelerator, settings)
    refuse_other_gradients(accelerator)
    refuse_state_dict(accelerator, model)
    refuse_changes(model)  # remembers the parameters
    if accelerator.state.deepspeed_plugin:
        exit_state.free = partial(_free, accelerator.deepspeed_engine_wrapped.engine)
    if (settings.warmup_steps or 0) >= (total := steps.schedule.total_steps):
        line = f"--warmup_steps {settings.warmup_steps}: the run has {total} steps, and never reaches --learning_rate"
        launch.log_on_main(accelerator, line)
    return model, optimizer, make_scheduler(optimizer, settings, total), steps


def _free(engine: Any) -> None:
    """Frees the optimizer's state, and under ZeRO-1 and 2 the model: hooks hold both until the process ends."""
    engine.optimizer.optimizer.state.clear()
    engine.destroy()


def refuse_other_gradients(accelerator: Accelerator) -> None:
    """Makes `torch.autograd.grad` (a gradient penalty, say) of what DeepSpeed's engine returned raise UserError:
    DeepSpeed divides such gradients by the accumulation, and takes them for the step's."""
    if not accelerator.state.deepspeed_plugin:
        return
    engine = accelerator.deepspeed_engine_wrapped.engine
    scale = require(engine, "_backward_prologue_per_tensor", "deepspeed")
    require(engine, "_running_engine_backward", "deepspeed")

    def scale_if_own(gradient: Any) -> Any:
        if not engine._running_engine_backward:
            raise UserError(
                "under DeepSpeed only `accelerator.backward` may compute gradients of the model's outputs: launch with "
                "ddp or fsdp2 (accelerate_configs/) to use `torch.autograd.grad` or `.backward()`"
            )
        return scale(gradient)

    engine._backward_prologue_per_tensor = scale_if_own


def coalesce_reductions(accelerator: Accelerator, settings: TrainingSettings) -> None:
    """Makes ZeRO-2 and ZeRO-3 reduce gradients once per optimizer step, as DDP does, not after each micro-batch. Call
    this after `accelerator.prepare`. Until the last micro-batch each process accumulates unsharded gradients, 4 bytes
    per trained parameter.

    Does nothing for 16-bit weights, which are meant to save memory, and for ZeRO-1, which reduces once anyway. See
    DeepSpeed's pull request 7992.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return
    wrapper, block = accelerator.deepspeed_engine_wrapped, contextlib.ExitStack()
    engine, each_batch = wrapper.engine, settings.sync_each_batch
    is_half = any(each.dtype != torch.float32 for each in engine.module.parameters() if each.requires_grad)
    if plugin.zero_stage == 1 and each_batch:
        launch.log_on_main(accelerator, "sync_each_batch: ZeRO-1 reduces gradients once a step all the same")
    elif plugin.zero_stage > 1 and is_half and each_batch is False:
        launch.log_on_main(
            accelerator, "sync_each_batch: with 16-bit weights ZeRO reduces gradients after each micro-batch"
        )
    if plugin.zero_stage < 2 or each_batch or is_half:
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
