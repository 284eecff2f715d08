"""The optimizers, among them Lion and Muon, their parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, ReduceLROnPlateau
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from toolkit.config import TrainingSettings
from toolkit.errors import UserError, did_you_mean, first_line
from toolkit.models.layers import distances

# names of biases and norms, which are not decayed, from transformers.Trainer
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

DISTANCE = "layers_from_head"
"""Key of a parameter group: its distance from the head, for `--unfreeze_every`."""

HIDDEN = "hidden_matrices"
"""Key of a parameter group: whether Muon trains it."""

# parameters that Lion updates together: a GPU needs few kernels, and little memory for their directions
_AT_ONCE = 32


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms"), which PyTorch does not have: updates
    by the sign of a momentum, one moment per weight, where AdamW has two. Weight decay is decoupled."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            trained = [each for each in group["params"] if each.grad is not None]
            for each in trained:
                if "exp_avg" not in self.state[each]:
                    self.state[each]["exp_avg"] = torch.zeros_like(each)
            for start in range(0, len(trained), _AT_ONCE):
                some = trained[start : start + _AT_ONCE]
                moments, grads = (
                    [self.state[each]["exp_avg"] for each in some],
                    [each.grad for each in some],
                )
                directions = torch._foreach_lerp(moments, grads, 1 - beta1)
                torch._foreach_sign_(directions)
                torch._foreach_mul_(some, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(some, directions, alpha=-group["lr"])
                torch._foreach_lerp_(moments, grads, 1 - beta2)
        return closure and closure()


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks") for the matrices
    of hidden layers, and its AdamW for all other parameters. Muon's updates are scaled to the size of AdamW's (Liu et
    al., 2025, "Muon is Scalable for LLM Training"), so one learning rate, weight decay and schedule suits both."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """`params`: parameter groups; Muon trains those whose `HIDDEN` is true."""
        groups = list(params)
        hidden, rest = (
            [group for group in groups if group.get(HIDDEN, False) is kind]
            for kind in (True, False)
        )
        self._muon = torch.optim.Muon(
            hidden or [{"params": []}], lr, weight_decay, momentum, nesterov, ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        self._adamw = torch.optim.AdamW(rest or [{"params": []}], lr, betas, eps, weight_decay)
        super().__init__(
            groups, {"lr": lr, "weight_decay": weight_decay}
        )  # both have filled in their defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Both use this optimizer's groups and state, which loading a checkpoint replaces."""
        for optimizer in (self._muon, self._adamw):
            hidden = optimizer is self._muon
            optimizer.param_groups = [
                group for group in self.param_groups if group.get(HIDDEN, False) is hidden
            ]
            optimizer.state = self.state
            optimizer.step()
        return closure and closure()


_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor, "lion": Lion, "muon": Muon, "sgd": torch.optim.SGD,
}  # fmt: skip


def make_optimizer(model: torch.nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Creates `--optimizer` for the parameters that require gradients. Raises UserError if that fails."""
    name = settings.optimizer
    kind, arguments = optimizer_class(name), _arguments(settings.optimizer_args)
    if kind is torch.optim.AdamW:
        arguments = {"fused": not {"foreach", "differentiable"} & arguments.keys()} | arguments
    rate, decay, gradual = (
        settings.learning_rate,
        settings.layerwise_lr_decay,
        settings.unfreeze_every is not None,
    )
    groups = parameter_groups(model, settings.weight_decay, rate, decay, gradual, muon=kind is Muon)
    try:
        return kind(groups, lr=rate, **arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        names = [
            word
            for word in inspect.signature(kind).parameters
            if word not in ("params", "lr", "weight_decay")
        ]
        setting = f"--optimizer {name} --optimizer_args {settings.optimizer_args}"
        hint = (
            "; use --optimizer muon, which trains only matrices by Muon"
            if kind is torch.optim.Muon
            else ""
        )
        raise UserError(
            f"{setting}: {first_line(error)}; {kind.__name__} takes {', '.join(names)}{hint}"
        ) from error


def optimizer_class(name: str) -> Any:
    if name.lower() in _OPTIMIZERS:
        return _OPTIMIZERS[name.lower()]
    module, _, attribute = name.rpartition(".")
    if not module:
        names = [*_OPTIMIZERS, "MODULE.CLASS"]
        raise UserError(
            f"--optimizer {name}{did_you_mean(name, names)}: there are {', '.join(names)}"
        )
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--optimizer {name} cannot be imported: {first_line(error)}") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError(f"--optimizer {name} is not a torch.optim.Optimizer")
    return kind


def _arguments(text: str | None) -> dict[str, Any]:
    """Parses `momentum=0.9,betas=(0.9,0.95)` as keyword arguments with literal values."""
    try:
        call = ast.parse(f"_({text or ''})", mode="eval").body
        assert isinstance(call, ast.Call)
        if (
            call.args
            or any(word.arg is None for word in call.keywords)
            or not isinstance(call.func, ast.Name)
        ):
            raise ValueError("each argument needs a name")
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        hint = "write momentum=0.9,nesterov=True or betas=(0.9,0.95)"
        raise UserError(f"--optimizer_args {text}: {first_line(error)}; {hint}") from error
    for name, setting in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if name in arguments:
            raise UserError(f"--optimizer_args {text}: pass {name} as --{setting} instead")
    return arguments


def parameter_groups(
    model: torch.nn.Module,
    weight_decay: float,
    learning_rate: float = 0.0,
    layer_decay: float | None = None,
    gradual: bool = False,
    muon: bool = False,
) -> list[dict[str, Any]]:
    """Returns the parameters that require gradients in groups with and without weight decay (biases, norms).

    Parameters are chosen by name, since strategies that shard them change their shape. With `layer_decay` or `gradual`
    (`--unfreeze_every`) each layer has two groups, starting with the head's. `layer_decay` multiplies the learning rate
    from each layer to the one below (Howard and Ruder, 2018; Clark et al., 2020, "ELECTRA"). `muon` puts the matrices
    of layers into separate groups. Raises UserError for a model without layers.
    """
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], _NO_DECAY))
    by_layer = layer_decay is not None or gradual
    distance_of = distances(model) if by_layer or muon else {}
    if (by_layer or muon) and not distance_of:
        setting = (
            "unfreeze_every"
            if gradual
            else "optimizer muon"
            if muon
            else f"layerwise_lr_decay {layer_decay}"
        )
        raise UserError(f"--{setting}: {type(model).__name__} has no list of layers")
    lowest = max(distance_of.values(), default=0)
    kinds: dict[tuple[int, bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            distance = distance_of.get(id(parameter), 0)
            hidden = muon and parameter.ndim == 2 and 0 < distance < lowest
            kinds.setdefault((distance * by_layer, name not in decayed, hidden), []).append(
                parameter
            )
    groups: list[dict[str, Any]] = []
    for (distance, plain, hidden), parameters in sorted(kinds.items()):
        group = {"params": parameters, "weight_decay": 0.0 if plain else weight_decay}
        group |= {} if layer_decay is None else {"lr": learning_rate * layer_decay**distance}
        groups.append(
            group | ({DISTANCE: distance} if gradual else {}) | ({HIDDEN: hidden} if muon else {})
        )
    return groups


def make_scheduler(
    optimizer: Any, settings: TrainingSettings, total_steps: int
) -> AcceleratedScheduler:
    """The schedule of `--lr_scheduler_type` for a prepared optimizer, stepped once per optimizer step.

    A step that fp16 skips does not count. Do not pass it to `accelerator.prepare`, which would step it once per
    process. With `--unfreeze_every N` the rate of a group that is n layers below the head is 0 for the first n N steps.
    Raises UserError for a learning rate too low for the schedule.
    """
    warmup = settings.warmup_steps
    if warmup is None:
        warmup = math.ceil(total_steps * (settings.warmup_ratio or 0.0))
    plain = unwrapped_optimizer(optimizer)
    name = settings.lr_scheduler_type
    most = max(total_steps, warmup + 1)  # polynomial divides by the steps after the warm-up
    try:
        schedule = get_scheduler(name, plain, num_warmup_steps=warmup, num_training_steps=most)
    except ValueError as error:  # polynomial ends at 1e-7
        fault = f"--lr_scheduler_type {name} --learning_rate {settings.learning_rate:g}: {first_line(error)}"
        raise UserError(
            f"{fault}: raise --learning_rate, or choose another schedule (linear)"
        ) from error
    if every := settings.unfreeze_every:
        rate = schedule.lr_lambdas[0]  # all groups have the same
        schedule.lr_lambdas = [
            partial(_rate_from, group[DISTANCE] * every, rate) for group in plain.param_groups
        ]
    scheduler = _prepared_scheduler(schedule, optimizer)
    set_schedule(scheduler, 0)
    return scheduler


def custom_scheduler(
    optimizer: Any, create: Callable[[torch.optim.Optimizer], Any]
) -> AcceleratedScheduler:
    """Another schedule for a prepared optimizer, stepped like that of `make_scheduler`. `create` gets the optimizer
    without its wrappers, at the learning rates that it was created with, and returns a scheduler of torch. Raises
    UserError for one that depends on more than the number of steps, which a resumed run could not continue."""
    plain = unwrapped_optimizer(optimizer)
    if any(DISTANCE in group for group in plain.param_groups):
        raise UserError(
            "--unfreeze_every works with the schedules of --lr_scheduler_type only: leave it out"
        )
    for group in plain.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])  # not that of a warm-up's first step
    schedule = create(plain)
    if isinstance(schedule, ReduceLROnPlateau | ChainedScheduler):
        remedy = (
            "a resumed run could not continue it. Use LambdaLR, SequentialLR or another that does"
        )
        raise UserError(
            f"{type(schedule).__name__} does not follow from the number of steps: {remedy}"
        )
    return _prepared_scheduler(schedule, optimizer)


def _prepared_scheduler(schedule: Any, optimizer: Any) -> AcceleratedScheduler:
    # with fp16's scaler accelerate replaces `optimizer.step` in each step, of which torch would warn
    warnings.filterwarnings("ignore", message="Seems like `optimizer.step")
    return AcceleratedScheduler(
        schedule, optimizer, split_batches=True
    )  # one step, not one per process


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer that `Accelerator.prepare` wrapped."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _rate_from(first: int, rate: Callable[[int], float], step: int) -> float:
    """Gradual unfreezing (Howard and Ruder, 2018, "Universal Language Model Fine-tuning for Text Classification")."""
    return rate(step) if step >= first else 0.0


def set_schedule(scheduler: AcceleratedScheduler, steps: int) -> None:
    """Sets the schedule to its state after `steps` optimizer steps; those of transformers depend on nothing else.
    Others (`custom_scheduler`) must be new, and are stepped."""
    schedule = scheduler.scheduler
    if isinstance(schedule, LambdaLR):
        schedule.last_epoch, steps = steps - 1, 1
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate  # a checkpoint may have replaced it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(steps):
            schedule.step()
