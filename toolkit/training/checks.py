"""Checks that the model's parameters, the optimizer and the strategy fit together, before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from toolkit.checkpoint.parameters import full_shape
from toolkit.config import TrainingSettings
from toolkit.errors import Faults, UserError, listing
from toolkit.launch import log_on_main
from toolkit.training.optimizer import DISTANCE, OF_SETTINGS, optimizer_class
from toolkit.training.optimizer_trial import shard_fault, step_fault
from toolkit.utils.modules import unwrapped

OWN_SCHEDULE = "docs/your-own-recipe.md, Another schedule"
LOSS_PARAMETERS = "docs/your-own-recipe.md, A loss with parameters"
HOW_TO_FREEZE = (
    "Freeze parameters before creating the optimizer (--freeze_layers N), and pass it all others; to unfreeze layers "
    "one by one, pass --unfreeze_every N"
)
UNEVEN_HOOK = (
    "a hook that clips gradients gets those of a micro-batch, scaled by the number of processes and fp16: pass "
    "--max_grad_norm, or clip in the `step` of your optimizer"
)
TOKENS = "_toolkit_tokens"
"""Attribute of a tokenizer: its size when it read the data."""
# optimizers in C++ and CUDA, made for shards of parameters
_MADE_FOR_SHARDS = ("deepspeed.ops.adam", "deepspeed.ops.adagrad", "deepspeed.ops.lion")


def optimizer_fault(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> str:
    """Why the training loop, or a strategy that shards parameters, cannot use an optimizer; empty if they can."""
    name, plugin = type(optimizer).__name__, accelerator.state.deepspeed_plugin
    offloads = getattr(plugin, "offload_optimizer_device", None) == "cpu"
    device = torch.device("cpu") if offloads else accelerator.device
    stage = plugin.zero_stage if plugin else 0
    if why := step_fault(
        optimizer, device, *([] if stage else [None])
    ):  # accelerate passes a closure
        return (
            f"{name} fails in `step()` or `load_state_dict()`: {why}. Use one that needs only the gradients of all "
            "parameters (--optimizer adamw, lion, muon or sgd)"
        )
    if stage and isinstance(optimizer, torch.optim.Adagrad):
        why = "DeepSpeed replaces an Adagrad, and drops its parameter groups"
    elif (stage or accelerator.is_fsdp2) and not type(optimizer).__module__.startswith(
        _MADE_FOR_SHARDS
    ):
        why = shard_fault(optimizer, device, stage)
    if not why:
        return ""
    strategy = f"ZeRO-{stage}" if stage else "FSDP2"
    return (
        f"{name} computes different updates from {strategy}'s shards of parameters: {why}. Launch with ddp "
        "(accelerate_configs/), or use an elementwise optimizer (--optimizer adamw, lion or sgd)"
    )


def check_parameters(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: TrainingSettings,
    total_steps: int,
) -> None:  # fmt: skip
    """Raises UserError unless the optimizer, not yet prepared, has exactly the model's parameters that require
    gradients, and remembers these for `loop_checks`."""
    items = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in items}
    parameters = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    faults = Faults()
    if foreign := [each for key, each in parameters.items() if key not in names]:
        faults.add(f"the optimizer has {not_in_model(foreign)}")
    if frozen := [
        names[key] for key, each in parameters.items() if key in names and not each.requires_grad
    ]:
        faults.add(
            f"the optimizer has parameters that are frozen: {listing(frozen, 4)}. {HOW_TO_FREEZE}"
        )
    if missing := [
        name for name, each in items if each.requires_grad and id(each) not in parameters
    ]:
        faults.add(
            f"the optimizer lacks parameters that require gradients: {listing(missing, 4)}. {HOW_TO_FREEZE}"
        )
    if low := low_precision_fault(model):
        faults.add(low)
    if any(group["lr"] is None for group in optimizer.param_groups):
        name = type(optimizer).__name__
        faults.add(
            f"{name} has no learning rate: pass lr=training.learning_rate (and relative_step=False)"
        )
    if fault := hook_fault(accelerator, items):
        faults.add(fault)
    if accumulated := [name for name, each in items if each._post_accumulate_grad_hooks]:
        what = "hooks after each micro-batch, not each step"
        faults.add(
            f"{listing(accumulated, 4)}: {what}: change gradients in the `step` of your optimizer"
        )
    if accelerator.is_fsdp2 and (scalars := [name for name, each in items if not each.dim()]):
        faults.add(
            f"FSDP2 cannot shard parameters without a dimension: make {listing(scalars, 4)} of shape (1,)"
        )
    name, arguments, decay = (
        settings.optimizer,
        settings.optimizer_args,
        settings.layerwise_lr_decay,
    )
    inner = (optimizer, *vars(optimizer).values())  # it may wrap another
    if (name != "adamw" or arguments) and not any(
        isinstance(each, optimizer_class(name)) for each in inner
    ):
        setting = f"--optimizer {name}" + (f" --optimizer_args {arguments}" if arguments else "")
        faults.add(
            f"{setting}: the recipe makes a {type(optimizer).__name__}: use make_optimizer, or leave it out"
        )
    if decay not in (None, 1) and len({group["lr"] for group in optimizer.param_groups}) == 1:
        how = "make the groups by parameter_groups(..., layer_decay=...), or leave it out"
        faults.add(
            f"--layerwise_lr_decay {decay}: all trained parameters have one learning rate: {how}"
        )
    if every := settings.unfreeze_every:
        turns: set[Any] = {group.get(DISTANCE) for group in optimizer.param_groups}
        if None in turns:
            faults.add(
                f"--unfreeze_every {every}: make the optimizer's groups by parameter_groups(..., gradual=True)"
            )
        elif never := sum(turn * every >= total_steps for turn in turns):
            line = f"--unfreeze_every {every}: {never} of {len(turns)} groups stay frozen for all {total_steps} steps"
            log_on_main(accelerator, line)
    faults.raise_if_any()
    vars(model)[_PREPARED] = [(name, parameter.requires_grad) for name, parameter in items], []


def hook_fault(accelerator: Accelerator, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Names parameters with hooks that the strategy drops, or that clip gradients; empty if there are none."""
    hooks = {
        name: (each, each._backward_hooks.values())
        for name, each in parameters
        if each._backward_hooks
    }
    if hooks and accelerator.is_fsdp2:
        return (
            f"FSDP2 drops the hooks of parameters ({listing(hooks, 4)}): launch with ddp or ZeRO-2"
        )
    clipped = [
        name
        for name, (each, some) in hooks.items()
        if not all(map(partial(_is_linear, each), some))
    ]
    return f"{listing(clipped, 4)}: {UNEVEN_HOOK}" if clipped else ""


def _is_linear(parameter: torch.Tensor, hook: Any) -> bool:
    """Whether a hook commutes with the sum of gradients, and with a factor."""
    shape = full_shape(parameter)
    one = torch.linspace(-1, 1, math.prod(shape), device=parameter.device).reshape(shape)
    results = [
        value if (result := hook(value.clone())) is None else result
        for value in (one, 1e4 * one.square(), one + 1e4 * one.square())
    ]
    return torch.allclose(results[0] + results[1], results[2], rtol=1e-4)


def low_precision_fault(model: torch.nn.Module) -> str:
    trained = ((name, each.dtype) for name, each in model.named_parameters() if each.requires_grad)
    low = [name for name, dtype in trained if dtype in (torch.bfloat16, torch.float16)]
    how = "load the model with dtype=torch.float32, within `toolkit.whole_weights()`, and leave `.half()` out"
    return (
        f"{listing(low, 4)}: 16 bits lose small updates: {how} (use --mixed_precision)"
        if low
        else ""
    )


_PREPARED = "_toolkit_prepared"
"""Attribute of a model, since a recipe passes only the model from `prepare` to a step. In a global dictionary with weak
keys a model would never be freed under ZeRO, where its parameters lead back to it."""


def prepared(model: Any) -> tuple[list[tuple[str, bool]], list[Any]]:
    """(name, requires_grad) of each parameter before `accelerator.prepare`; the parameters after it."""
    return vars(unwrapped(model)).get(_PREPARED) or ([], [])


def parameters_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """(name, parameter) of each; of a prepared model without a search."""
    before, after = prepared(model)
    names = (name for name, _ in before)
    return (
        list(zip(names, after, strict=True)) if after else list(unwrapped(model).named_parameters())
    )


def refuse_early_prepare(accelerator: Any) -> None:
    """Makes `accelerator.prepare` raise UserError for a prepared model, and before `align_strategy` has seen one (but
    for a frozen model, which accelerate only moves to the device in one process and under DDP)."""
    prepare, aligned = accelerator.prepare, list[bool]()
    shards = accelerator.is_fsdp2 or accelerator.state.deepspeed_plugin

    def checked(*objects: Any, **options: Any) -> Any:
        for model in (each for each in objects if isinstance(each, torch.nn.Module)):
            before, after = prepared(model)
            trains = shards or any(parameter.requires_grad for parameter in model.parameters())
            if after or (trains and not (before or aligned)):
                raise UserError(
                    "leave out `accelerator.prepare`: `toolkit.prepare` calls it, with its checks; move a second model "
                    "to `accelerator.device`"
                )
            aligned.extend([True] * bool(before))
        return prepare(*objects, **options)

    accelerator.prepare = checked


def refuse_compiled(model: torch.nn.Module) -> None:
    """Raises UserError for a model, or a part of it, that a recipe has compiled."""
    parts, module = (vars(part) for part in model.modules()), unwrapped(model)
    compiled = [
        part["forward"]
        for part in parts
        if hasattr(part.get("forward"), "_torchdynamo_orig_callable")
    ]
    forwards = any(not getattr(forward, "_torchdynamo_disable", False) for forward in compiled)
    if (
        forwards
        or module._compiled_call_impl
        or any("_orig_mod." in name for name, _ in model.named_parameters())
    ):
        raise UserError(
            "torch.compile renames the model's weights, and a whole compiled forward can hang in shards of weights: "
            "leave it out, and pass --torch_compile true"
        )


def check_scheduler(
    accelerator: Accelerator, optimizer: Any, scheduler: Any, settings: TrainingSettings
) -> None:
    """Logs a setting that a recipe's own schedule may ignore.

    Raises UserError unless `prepare` has returned the optimizer, and the scheduler counts its steps. The scheduler that
    `accelerator.prepare` returns counts each step once per process.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise UserError(
            f"run.resume() takes the optimizer that `prepare` returned, not a {type(optimizer).__name__}: create it "
            "before `toolkit.prepare`, and pass it to that (docs/your-own-recipe.md, Another optimizer)"
        )
    if (
        isinstance(scheduler, AcceleratedScheduler)
        and scheduler.split_batches
        and scheduler.optimizers == [optimizer]
    ):
        if (name := settings.lr_scheduler_type) != "linear" and OF_SETTINGS not in vars(scheduler):
            line = (
                f"--lr_scheduler_type {name}: no effect, unless the schedule of the recipe reads it"
            )
            log_on_main(accelerator, line)
        return
    schedule = getattr(scheduler, "scheduler", scheduler)
    raise UserError(
        f"run.resume() got a {type(schedule).__name__} that does not follow the optimizer that `prepare` returned: "
        f"create it with `toolkit.custom_scheduler` ({OWN_SCHEDULE})"
    )


def not_in_model(parameters: list[Any]) -> str:
    shapes = listing([f"of shape {tuple(each.shape)}" for each in parameters], 4)
    return (
        f"parameters that are not the model's ({shapes}): processes would train different copies, and no checkpoint "
        f"would save them. Make them part of the model ({LOSS_PARAMETERS})"
    )


def not_in_loss(names: list[str]) -> str:
    return (
        f"the loss does not use parameters that are trained: {listing(names, 4)}. Leave them out of the model "
        "(`add_pooling_layer=False`), freeze them before the optimizer is created, or use them in each micro-batch"
    )
