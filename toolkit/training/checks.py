"""Errors of an edited recipe about parameters and optimizers, raised before a wrong step."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from toolkit.config import TrainingSettings
from toolkit.errors import Faults, UserError, listing
from toolkit.launch import log_on_main
from toolkit.training.optimizer import DISTANCE
from toolkit.training.optimizer_trial import pieces_fault, use_fault
from toolkit.utils.modules import unwrapped

_LOSS_PARAMETERS = "docs/your-own-recipe.md, A loss with parameters"
_HOW_TO_FREEZE = (
    "Freeze parameters before the optimizer is made (--freeze_layers N), and give it all others; to let layers join "
    "one after the other, pass --unfreeze_every N"
)
_MOST_NAMES = 4
_FOR_PIECES = ("deepspeed.ops.adam", "deepspeed.ops.adagrad", "deepspeed.ops.lion")  # in C++ and CUDA


def optimizer_faults(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> Faults:
    """Why this optimizer cannot be used in the loop, or not under this strategy, which shards parameters."""
    name, plugin, faults = type(optimizer).__name__, accelerator.state.deepspeed_plugin, Faults()
    offloads = getattr(plugin, "offload_optimizer_device", None) == "cpu"
    device = torch.device("cpu") if offloads else accelerator.device
    stage = plugin.zero_stage if plugin else 0
    if why := use_fault(optimizer, device):
        faults.add(
            f"{name} cannot take a step by `optimizer.step()` in the loop: {why}. Take one that needs "
            "nothing but the gradients of all parameters (--optimizer adamw, lion, muon or sgd)"
        )
    elif stage and isinstance(optimizer, torch.optim.Adagrad):
        why, way = "DeepSpeed makes an Adagrad anew, without its groups", "ddp or fsdp2"
    elif (stage or accelerator.is_fsdp2) and not type(optimizer).__module__.startswith(_FOR_PIECES):
        why, way = pieces_fault(optimizer, device, stage), "ddp"
        if why and stage and not pieces_fault(optimizer, device, 0):
            way = "ddp or fsdp2"
    if why and not faults.faults:
        strategy = f"ZeRO-{stage}" if stage else "FSDP2"
        faults.add(
            f"{name} would be another optimizer under {strategy}, which hands it pieces of parameters"
            f"{', one group after the other' if stage else ''}: {why}. Launch it with {way} "
            "(accelerate_configs/), or take one that works weight by weight (--optimizer adamw, lion or sgd)"
        )
    return faults


def check_parameters(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: TrainingSettings,
    total_steps: int,
) -> None:  # fmt: skip
    """Raises UserError unless the optimizer, not yet prepared, trains the very parameters of the model that require
    gradients. Later `refuse_changes` raises where that is no longer so."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    faults = Faults()
    if foreign := [each for key, each in parameters.items() if key not in names]:
        faults.add(f"the optimizer has {_foreign(foreign)}")
    if frozen := [names[key] for key, each in parameters.items() if key in names and not each.requires_grad]:
        faults.add(f"the optimizer has parameters that are frozen: {_some(frozen)}. {_HOW_TO_FREEZE}")
    if missing := [
        name for name, each in model.named_parameters() if each.requires_grad and id(each) not in parameters
    ]:
        faults.add(f"the optimizer lacks parameters that require gradients: {_some(missing)}. {_HOW_TO_FREEZE}")
    scalars = [name for name, each in model.named_parameters() if not each.dim()]
    if accelerator.is_fsdp2 and scalars:
        faults.add(f"FSDP2 cannot shard parameters without a dimension: make {_some(scalars)} of shape (1,)")
    if every := settings.unfreeze_every:
        turns = {group.get(DISTANCE, -1) for group in optimizer.param_groups}
        if -1 in turns:
            faults.add(
                f"--unfreeze_every {every}: the optimizer's groups do not say how far they are from the head: make "
                "them with parameter_groups(..., gradual=True)"
            )
        elif never := sum(turn * every >= total_steps for turn in turns):
            log_on_main(
                accelerator,
                f"--unfreeze_every {every}: {never} of {len(turns)} turns never come in {total_steps} steps",
            )
    faults.raise_if_any()
    _AT_START[model] = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()], []


_AT_START: WeakKeyDictionary[torch.nn.Module, tuple[list[tuple[str, bool]], list[Any]]] = WeakKeyDictionary()
"""A model before `accelerator.prepare` -> its parameters' names and whether they were trained; the parameters after. By
model, since the loop passes nothing but the model from there to a step."""


def refuse_changes(model: Any) -> None:
    """Raises UserError where other parameters of a prepared model require gradients than before it was prepared: a
    strategy has laid out gradients and masters for those. Cheap enough for each step."""
    module = unwrapped(model)
    before, parameters = _AT_START.get(module, ([], []))
    if before and not parameters:
        parameters.extend(module.parameters())  # FSDP2 has made others
    pairs = zip(before, parameters, strict=False)
    if changed := [name for (name, trained), parameter in pairs if parameter.requires_grad is not trained]:
        raise UserError(
            f"requires_grad has changed since accelerator.prepare, and the optimizer cannot follow: {_some(changed)}. "
            f"{_HOW_TO_FREEZE}"
        )


def refuse_foreign_parameters(model: Any, losses: torch.Tensor) -> None:
    """Raises UserError where losses depend on parameters that are not the model's (a second optimizer's, say)."""
    parameters = {id(parameter): parameter for parameter in unwrapped(model).parameters()}
    if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return  # FSDP2 computes with others than these
    nodes, visited, foreign = [losses.grad_fn], set(), []
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes.extend(following for following, _ in node.next_functions)
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
        if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in parameters:
            foreign.append(leaf)
    if foreign:
        raise UserError(f"the loss has {_foreign(foreign)}")


def _foreign(parameters: list[Any]) -> str:
    shapes = _some([f"of shape {tuple(each.shape)}" for each in parameters])
    return (
        f"parameters that are not the model's ({shapes}): each process would train its own, and no checkpoint would "
        f"hold them. Make them a part of the model ({_LOSS_PARAMETERS})"
    )


def refuse_shards(model: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which computing with a parameter that ZeRO-3 or FSDP2 has sharded raises UserError, except in the
    model's forward. ZeRO-3 leaves it empty: a sum of it is 0, and most else an error of shapes."""
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
        sharded = [self.names[id(each)] for each in parameters if isinstance(each, DTensor) or not _is_whole(each)]
        if not sharded or _called_by_strategy():
            return function(*args, **(kwargs or {}))
        try:
            if not isinstance(result := function(*args, **(kwargs or {})), torch.Tensor):
                return result  # its device, say
        except (RuntimeError, IndexError, TypeError, ValueError):
            pass
        raise UserError(
            f"{_some(sharded)}: sharded, and not to be computed with here, outside of a forward: do that in the "
            f"forward of the module that holds it ({_LOSS_PARAMETERS})"
        )


def _is_whole(parameter: Any) -> bool:
    return bool(parameter.ds_status.name != "NOT_AVAILABLE")


def _called_by_strategy() -> bool:
    """Whether DeepSpeed, Accelerate or FSDP2 computes, and not a recipe."""
    frame: Any = sys._getframe(2)
    while frame and (inner := re.search(r"/(torch|deepspeed|accelerate)/(distributed/)?", frame.f_code.co_filename)):
        if inner[1] != "torch" or inner[2]:
            return True
        frame = frame.f_back
    return False


def _some(names: list[str]) -> str:
    return listing(names, _MOST_NAMES)
