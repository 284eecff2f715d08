"""Checks that the model's parameters, the optimizer and the strategy fit together, before the first step."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from toolkit.config import TrainingSettings
from toolkit.errors import Faults, UserError, listing
from toolkit.launch import log_on_main
from toolkit.training.optimizer import DISTANCE
from toolkit.training.optimizer_trial import shard_fault, step_fault
from toolkit.utils.modules import autograd_leaves, unwrapped

OWN_SCHEDULE = "docs/your-own-recipe.md, Another schedule"
_LOSS_PARAMETERS = "docs/your-own-recipe.md, A loss with parameters"
_HOW_TO_FREEZE = (
    "Freeze parameters before creating the optimizer (--freeze_layers N), and pass it all others; to unfreeze layers "
    "one by one, pass --unfreeze_every N"
)
# optimizers in C++ and CUDA, made for shards of parameters
_MADE_FOR_SHARDS = ("deepspeed.ops.adam", "deepspeed.ops.adagrad", "deepspeed.ops.lion")


def optimizer_fault(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> str:
    """Why the training loop, or a strategy that shards parameters, cannot use an optimizer; empty where they can."""
    name, plugin = type(optimizer).__name__, accelerator.state.deepspeed_plugin
    offloads = getattr(plugin, "offload_optimizer_device", None) == "cpu"
    device = torch.device("cpu") if offloads else accelerator.device
    stage = plugin.zero_stage if plugin else 0
    if why := step_fault(optimizer, device):
        return (
            f"{name} fails in `optimizer.step()`: {why}. Use an optimizer that needs only the gradients of all "
            "parameters (--optimizer adamw, lion, muon or sgd)"
        )
    if stage and isinstance(optimizer, torch.optim.Adagrad):
        why = "DeepSpeed replaces an Adagrad, and drops its parameter groups"
    elif (stage or accelerator.is_fsdp2) and not type(optimizer).__module__.startswith(_MADE_FOR_SHARDS):
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
    gradients, and remembers these for `refuse_changes`."""
    items = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in items}
    parameters = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    faults = Faults()
    if foreign := [each for key, each in parameters.items() if key not in names]:
        faults.add(f"the optimizer has {_not_in_model(foreign)}")
    if frozen := [names[key] for key, each in parameters.items() if key in names and not each.requires_grad]:
        faults.add(f"the optimizer has parameters that are frozen: {listing(frozen, 4)}. {_HOW_TO_FREEZE}")
    if missing := [name for name, each in items if each.requires_grad and id(each) not in parameters]:
        faults.add(f"the optimizer lacks parameters that require gradients: {listing(missing, 4)}. {_HOW_TO_FREEZE}")
    if any(group["lr"] is None for group in optimizer.param_groups):
        name = type(optimizer).__name__
        faults.add(
            f"{name} has no learning rate for the schedule: pass lr=training.learning_rate (relative_step=False)"
        )
    if accelerator.is_fsdp2 and (scalars := [name for name, each in items if not each.dim()]):
        faults.add(f"FSDP2 cannot shard parameters without a dimension: make {listing(scalars, 4)} of shape (1,)")
    if every := settings.unfreeze_every:
        turns: set[Any] = {group.get(DISTANCE) for group in optimizer.param_groups}
        if None in turns:
            faults.add(
                f"--unfreeze_every {every}: the optimizer's groups lack their distance from the head: create them by "
                "parameter_groups(..., gradual=True)"
            )
        elif never := sum(turn * every >= total_steps for turn in turns):
            line = f"--unfreeze_every {every}: {never} of {len(turns)} groups stay frozen for all {total_steps} steps"
            log_on_main(accelerator, line)
    faults.raise_if_any()
    _PREPARED[model] = [(name, parameter.requires_grad) for name, parameter in items], []


_PREPARED: WeakKeyDictionary[torch.nn.Module, tuple[list[tuple[str, bool]], list[Any]]] = WeakKeyDictionary()
"""Model -> (name, requires_grad) of each parameter before `accelerator.prepare`; the parameters after it. Global, since
a recipe passes only the model from `prepare` to a step."""


def refuse_changes(model: Any) -> None:
    """Raises UserError where `requires_grad` of a parameter has changed since the model was prepared, or a parameter
    was added: a strategy allocates gradients and masters in `prepare`. Cheap enough for each step."""
    module = unwrapped(model)
    before, parameters = _PREPARED.get(module, ([], []))
    if before and not parameters:
        parameters.extend(module.parameters())  # FSDP2 replaces them
        if len(parameters) > len(before):
            added = [name for name, _ in module.named_parameters() if name not in dict(before)]
            raise UserError(f"add parameters to the model before the optimizer and `prepare`: {listing(added, 4)}")
    pairs = zip(before, parameters, strict=False)
    if changed := [name for (name, trained), parameter in pairs if parameter.requires_grad is not trained]:
        raise UserError(
            "requires_grad has changed since accelerator.prepare, which the optimizer does not support: "
            f"{listing(changed, 4)}. {_HOW_TO_FREEZE}"
        )


def check_scheduler(optimizer: Any, scheduler: Any) -> None:
    """Raises UserError unless `prepare` has returned the optimizer, and the scheduler counts its steps. The scheduler
    that `accelerator.prepare` returns counts each step once per process."""
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise UserError(
            f"run.resume() takes the optimizer that `prepare` returned, not a {type(optimizer).__name__}: create it "
            "before `toolkit.prepare`, and pass it to that (docs/your-own-recipe.md, Another optimizer)"
        )
    if isinstance(scheduler, AcceleratedScheduler) and scheduler.split_batches and scheduler.optimizers == [optimizer]:
        return
    schedule = getattr(scheduler, "scheduler", scheduler)
    raise UserError(
        f"run.resume() got a {type(schedule).__name__} that is not made for the optimizer that `prepare` returned, to "
        f"step once with it, for any number of processes: make it by `toolkit.custom_scheduler` ({OWN_SCHEDULE})"
    )


def refuse_foreign_parameters(model: Any, losses: torch.Tensor) -> None:
    """Raises UserError where losses depend on parameters outside the model."""
    parameters = {id(parameter): parameter for parameter in unwrapped(model).parameters()}
    if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return  # FSDP2 computes with gathered copies
    leaves = [leaf for leaf in autograd_leaves(losses) if isinstance(leaf, torch.nn.Parameter)]
    if foreign := [leaf for leaf in leaves if id(leaf) not in parameters]:
        raise UserError(f"the loss has {_not_in_model(foreign)}")


def _not_in_model(parameters: list[Any]) -> str:
    shapes = listing([f"of shape {tuple(each.shape)}" for each in parameters], 4)
    return (
        f"parameters that are not the model's ({shapes}): processes would train different copies, and no checkpoint "
        f"would save them. Make them part of the model ({_LOSS_PARAMETERS})"
    )


def refuse_gradients(model: Any, step: int) -> None:
    """Raises UserError where an earlier step's gradients would be added to this step's. Cheap after `zero_grad()`."""
    if any(each.grad is not None and bool(each.grad.any()) for each in model.parameters()):
        raise UserError(
            f"step {step} begins with an earlier one's gradients: call `optimizer.zero_grad()` after `optimizer.step()`"
        )


def refuse_plain_backward(accelerator: Accelerator) -> None:
    """For a result of `Step.mean` whose gradient is 1. Raises UserError unless `accelerator.backward` makes that of it,
    which divides by the accumulation and multiplies by fp16's scale."""
    if accelerator.gradient_accumulation_steps > 1 or accelerator.mixed_precision == "fp16":
        raise UserError("use `accelerator.backward(step.mean(losses))`, not `.backward()`: it scales the gradients")


@contextlib.contextmanager
def counted_forwards(model: torch.nn.Module, calls: list[Any]) -> Iterator[None]:
    """Appends to `calls` when the model is called."""
    hook = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield
    finally:
        hook.remove()


def refuse_shards(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Within this context computing with a sharded parameter (ZeRO-3, FSDP2) outside the model's forward raises
    UserError. ZeRO-3 leaves such a parameter empty: its sum is 0, and most other operations fail on its shape."""
    parameters = unwrapped(model).named_parameters()
    names = {id(each): name for name, each in parameters if hasattr(each, "ds_status") or isinstance(each, DTensor)}
    return _RefuseShards(model, names) if names else contextlib.nullcontext()


class _RefuseShards(TorchFunctionMode):
    def __init__(self, model: torch.nn.Module, names: dict[int, str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def __enter__(self) -> Any:
        self._hooks = [
            self.model.register_forward_pre_hook(self._suspend),
            self.model.register_forward_hook(self._resume, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _suspend(self, *_: Any) -> None:
        super().__exit__(None, None, None)

    def _resume(self, *_: Any) -> None:
        super().__enter__()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parameters = [each for each in tree_leaves((args, kwargs)) if id(each) in self.names]
        sharded = [
            self.names[id(each)]
            for each in parameters
            if isinstance(each, DTensor) or each.ds_status.name == "NOT_AVAILABLE"
        ]
        if not sharded or _called_by_strategy():
            return function(*args, **(kwargs or {}))
        try:
            if not isinstance(result := function(*args, **(kwargs or {})), torch.Tensor):
                return result  # its device, say
        except (RuntimeError, IndexError, TypeError, ValueError):
            pass
        raise UserError(
            f"{listing(sharded, 4)}: sharded parameters are available only in the forward of their module: compute "
            f"with them there ({_LOSS_PARAMETERS})"
        )


def _called_by_strategy() -> bool:
    """Whether DeepSpeed, Accelerate or FSDP2 is the caller, and not the recipe."""
    frame: Any = sys._getframe(2)
    while frame and (inner := re.search(r"/(torch|deepspeed|accelerate)/(distributed/)?", frame.f_code.co_filename)):
        if inner[1] != "torch" or inner[2]:
            return True
        frame = frame.f_back
    return False
