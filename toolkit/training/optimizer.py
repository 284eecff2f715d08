"""The optimizer of the settings, its parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import ast
import importlib
import math
import warnings
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from toolkit.config import TrainingSettings
from toolkit.errors import UserError, did_you_mean, first_line, listing
from toolkit.models.layers import distances

# names of biases and norms, which are not decayed, from transformers.Trainer
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
}


def make_optimizer(
    model: torch.nn.Module, settings: TrainingSettings
) -> torch.optim.Optimizer:
    """Creates `--optimizer` for the parameters that require gradients. Raises UserError, or what
    the optimizer raises for its arguments."""
    kind = _optimizer_class(settings.optimizer)
    arguments = _arguments(settings.optimizer_args)
    if kind is torch.optim.AdamW:
        arguments = {"fused": True, **arguments}
    rate = settings.learning_rate
    groups = parameter_groups(
        model, settings.weight_decay, rate, settings.layerwise_lr_decay
    )
    return kind(groups, lr=rate, **arguments)


def _optimizer_class(name: str) -> Any:
    if name.lower() in _OPTIMIZERS:
        return _OPTIMIZERS[name.lower()]
    module, _, attribute = name.rpartition(".")
    if not module:
        names = [*_OPTIMIZERS, "MODULE.CLASS"]
        raise UserError(
            f"--optimizer {name}{did_you_mean(name, names)}: there are {listing(names)}"
        )
    return getattr(importlib.import_module(module), attribute)


def _arguments(text: str | None) -> dict[str, Any]:
    """Parses `momentum=0.9,betas=(0.9,0.95)` as keyword arguments with literal values."""
    arguments = {}
    try:
        call = ast.parse(f"_({text or ''})", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or call.args
            or not isinstance(call.func, ast.Name)
        ):
            raise ValueError("each argument needs a name")
        for word in call.keywords:
            arguments[str(word.arg)] = ast.literal_eval(word.value)
    except (SyntaxError, ValueError) as error:
        hint = "write momentum=0.9,nesterov=True or betas=(0.9,0.95)"
        raise UserError(f"--optimizer_args {text}: {first_line(error)}; {hint}") from error
    if {"lr", "weight_decay"} & arguments.keys():
        raise UserError(
            f"--optimizer_args {text}: use --learning_rate and --weight_decay instead"
        )
    return arguments


def parameter_groups(
    model: torch.nn.Module,
    weight_decay: float,
    learning_rate: float = 0.0,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Returns the parameters that require gradients in groups with and without weight decay
    (biases, norms).

    Parameters are chosen by name, since strategies that shard them change their shape. With
    `layer_decay` each layer has two groups, starting with the head's: it multiplies the learning
    rate from each layer to the one below (Howard and Ruder, 2018; Clark et al., 2020, "ELECTRA").
    Raises UserError for a model without layers."""
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], _NO_DECAY))
    distance_of: dict[int, int] = {}
    if layer_decay is not None:
        distance_of = distances(model)
        if not distance_of:
            fault = f"{type(model).__name__} has no list of layers"
            raise UserError(f"--layerwise_lr_decay {layer_decay}: {fault}")
    kinds: dict[tuple[int, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = (distance_of.get(id(parameter), 0), name not in decayed)
            kinds.setdefault(kind, []).append(parameter)
    groups: list[dict[str, Any]] = []
    for (distance, is_plain), parameters in sorted(kinds.items(), key=lambda item: item[0]):
        group = {"params": parameters, "weight_decay": 0.0 if is_plain else weight_decay}
        if layer_decay is not None:
            group["lr"] = learning_rate * layer_decay**distance
        groups.append(group)
    return groups


def make_scheduler(
    optimizer: Any,
    settings: TrainingSettings,
    total_steps: int,
    own: Any = None,
) -> AcceleratedScheduler:
    """The schedule of `--lr_scheduler_type` for a prepared optimizer, or the recipe's `own`,
    stepped once per optimizer step.

    A step that fp16 skips does not count. Do not pass it to `accelerator.prepare`, which would step
    it once per process. It may depend on the number of steps alone. Raises UserError for a schedule
    of another optimizer."""
    plain = unwrapped_optimizer(optimizer)
    schedule = own or _schedule_of_settings(settings, total_steps, plain)
    if getattr(schedule, "optimizer", None) is not plain:
        how = "scheduler = OneCycleLR(optimizer, ...); run.prepare(model, optimizer, scheduler)"
        raise UserError(
            f"the scheduler is not one of the optimizer that `prepare` gets: {how}"
        )
    # with fp16's scaler accelerate replaces `optimizer.step` in each step, of which torch warns
    warnings.filterwarnings("ignore", message="Seems like `optimizer.step")
    # split_batches: one step, not one per process
    return AcceleratedScheduler(schedule, optimizer, split_batches=True)


def _schedule_of_settings(
    settings: TrainingSettings, total_steps: int, optimizer: Any
) -> Any:
    warmup = settings.warmup_steps
    if warmup is None:
        warmup = math.ceil(total_steps * (settings.warmup_ratio or 0.0))
    # polynomial divides by the steps after the warm-up
    steps = max(total_steps, warmup + 1)
    return get_scheduler(settings.lr_scheduler_type, optimizer, warmup, steps)


def set_schedule(scheduler: AcceleratedScheduler, steps: int) -> None:
    """Steps a new schedule to its state after `steps` optimizer steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(steps):
            scheduler.scheduler.step()


def updates_done(scheduler: AcceleratedScheduler) -> int:
    """The optimizer's updates so far: a step that fp16 skips does not count."""
    return scheduler.scheduler.last_epoch


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer that `Accelerator.prepare` wrapped."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
