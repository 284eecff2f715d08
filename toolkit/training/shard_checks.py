"""What an edited recipe must not do with sharded parameters (ZeRO-3, FSDP2), with weights that DeepSpeed copies, and
with gradients of a micro-batch, which are scaled."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from toolkit.errors import UserError, listing
from toolkit.training.checks import LOSS_PARAMETERS, UNEVEN_HOOK, parameters_of
from toolkit.utils.compat import require
from toolkit.utils.modules import autograd_nodes, unwrapped

REPLACED = "_toolkit_replaced"
"""Attribute of the parameters that FSDP2 replaces."""
REMEDY_IN_FORWARD = f"compute with them there ({LOSS_PARAMETERS})"
REMEDY_IN_OPTIMIZER = (
    "use `step` of your optimizer (for an average --ema_decay), or launch with ddp"
)
_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_TO_NUMBERS = {"item", "tolist", "__float__", "__int__", "__bool__"}
_LIBRARIES = {"torch", "transformers", "peft", "accelerate", "deepspeed", "toolkit"}
_NO_CHANGE = {"requires_grad_", "detach_", "share_memory_"}


@contextlib.contextmanager
def refuse_shards(model: Any, remedy: str = REMEDY_IN_FORWARD) -> Iterator[None]:
    """Within this context computing with a sharded parameter (ZeRO-3, FSDP2) outside the model's forward raises
    UserError, which ends with `remedy`. ZeRO-3 leaves such a parameter empty: its sum is 0, and most other operations
    fail on its shape."""
    parameters = parameters_of(model)
    names = {
        id(each): name
        for name, each in parameters
        if hasattr(each, "ds_status") or isinstance(each, DTensor)
    }
    if not names:
        yield
        return
    mode = _RefuseShards(names, remedy)
    before, after = model.register_forward_pre_hook, model.register_forward_hook
    with mode, before(mode.suspend), after(mode.resume, always_call=True):
        yield


def refuse_copies(accelerator: Accelerator, model: Any) -> None:
    """Makes a recipe's `model.state_dict()` (with `torch.save` or `save_pretrained`, too), `model.load_state_dict` and
    `copy.deepcopy(model)` raise UserError if the strategy has shards, or trains its own copies of weights."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin or accelerator.is_fsdp2:
        for part in {model, *unwrapped(model).modules()}:
            part.register_load_state_dict_pre_hook(_refuse_loading)
            if part is model or not plugin or plugin.zero_stage == 3:
                part.register_state_dict_pre_hook(_refuse_state_dict)
                vars(part)["__deepcopy__"] = _refuse_deepcopy


def _is_sharded(parameter: Any) -> bool:
    """Under FSDP2 always, under ZeRO-3 unless it is gathered (small ones, and within `GatheredParameters`)."""
    status = getattr(parameter, "ds_status", None)
    return isinstance(parameter, DTensor) or (status is not None and status.name == "NOT_AVAILABLE")


# modules that gather weights, not those that start a recipe; and peft's functions that use only the names
_GATHERS = re.compile(
    r"(deepspeed|accelerate|torch\.distributed)\.(?!launch|commands|elastic|run$|utils\.launch)|toolkit\.checkpoint\."
)
_USE_NAMES = {"adapter_state_dict", "adapter_state_dict_load_map"}


def _refuse_state_dict(part: torch.nn.Module, *_: Any) -> None:
    if any(map(_is_sharded, part.parameters(recurse=False))) and not any(map(_gathers, _callers())):
        raise UserError(
            "model.state_dict() and save_pretrained() have only shards of weights: call "
            "`accelerator.get_state_dict(model)` in all processes, and save that (state_dict=...) in one"
        )


def _refuse_loading(*_: Any) -> None:
    if not any(map(_gathers, _callers())):
        raise UserError(
            "load_state_dict() after `prepare`: DeepSpeed and FSDP2 train their own copies or shards of weights: load "
            "weights before `toolkit.prepare`, or launch with ddp (accelerate_configs/)"
        )


def _refuse_deepcopy(_: Any) -> Any:
    raise UserError(
        "copy.deepcopy() of a prepared model, of which DeepSpeed and FSDP2 have shards: copy it before "
        "`toolkit.prepare` (a fixed teacher, moved to `accelerator.device`); for an average pass --ema_decay"
    )


def _gathers(frame: Any) -> bool:
    return (
        _GATHERS.match(str(frame.f_globals.get("__name__"))) is not None
        or frame.f_code.co_name in _USE_NAMES
    )


def _callers() -> Iterator[Any]:
    """The frames of the caller's callers, innermost first."""
    frame: Any = sys._getframe(2)
    while frame:
        yield frame
        frame = frame.f_back


class _RefuseShards(TorchFunctionMode):
    def __init__(self, names: dict[int, str], remedy: str) -> None:
        super().__init__()
        self.names, self.remedy = names, remedy

    def suspend(self, *_: Any) -> None:
        self.__exit__(None, None, None)

    def resume(self, *_: Any) -> None:
        self.__enter__()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        sharded = [
            each
            for each in tree_leaves((args, kwargs))
            if id(each) in self.names and _is_sharded(each)
        ]
        if not sharded or _called_by_strategy():
            return function(*args, **(kwargs or {}))
        try:
            if not isinstance(result := function(*args, **(kwargs or {})), torch.Tensor):
                return result  # its device, say
        except (RuntimeError, IndexError, TypeError, ValueError):
            pass
        raise UserError(
            f"{listing([self.names[id(each)] for each in sharded], 4)}: sharded parameters are available only in the "
            f"forward of their module: {self.remedy}"
        )


def refuse_stale_parameters(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """FSDP2 replaces the model's parameters, in the optimizer that is prepared with it."""
    if any(hasattr(each, REPLACED) for group in optimizer.param_groups for each in group["params"]):
        name = type(optimizer).__name__
        raise UserError(
            f"{name} has parameters that FSDP2 has replaced: create a second optimizer after `prepare`"
        )


class RefuseLocalNumbers(TorchFunctionMode):
    """Refuses `item`, `float` and the like of a DTensor whose value is not that of all processes, such as a norm."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        placements = (
            getattr(args[0], "placements", ()) if args and function.__name__ in _TO_NUMBERS else ()
        )
        if not all(each.is_replicate() for each in placements) and not _called_by_strategy():
            raise UserError(
                f"{function.__name__}() of a DTensor covers one shard: call `.full_tensor()` in all processes first"
            )
        return function(*args, **(kwargs or {}))


class RefuseChanges(TorchFunctionMode):
    """Refuses the recipe's changes of weights and uses of `grad` under DeepSpeed, which computes both from its own
    copies: a change of a weight is overwritten in the next step, and `grad` is None."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        trained = [(name, each) for name, each in parameters_of(model) if each.requires_grad]
        self.names = {id(each): name for name, each in trained}
        self.weights = {
            each.untyped_storage().data_ptr(): name for name, each in trained if each.numel()
        }

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, called, fault = "", function.__name__, ""
        if function in (_GRAD.__get__, _GRAD.__set__):
            name = self.names.get(id(args[0]), "")
            fault = (
                "grad is empty: DeepSpeed has stepped when `accelerator.backward` returns, with gradients clipped at "
                "--max_grad_norm, whose norm is the result of `accelerator.clip_grad_norm_`. To change gradients"
            )
        elif (
            function == _DATA.__set__
            or called == "__setitem__"
            or (called[-1] == "_" != called[-2] and called not in _NO_CHANGE)
        ):
            tensors = filter(torch.is_tensor, tree_leaves(args[:1]))
            names = (self.weights.get(each.untyped_storage().data_ptr()) for each in tensors)
            name = next(filter(None, names), "")
            fault = "DeepSpeed overwrites weights that the loop changes with its own copies. To change them"
        if not name or _called_by_strategy():
            return function(*args, **(kwargs or {}))
        raise UserError(f"{name}: {fault}, {REMEDY_IN_OPTIMIZER}")


def _called_by_strategy() -> bool:
    """Whether DeepSpeed, Accelerate, FSDP2 or this package is the caller, and not the recipe."""
    for frame in _callers():
        name = str(frame.f_globals.get("__name__"))
        package = name.partition(".")[0]
        if package in ("deepspeed", "accelerate") or name.startswith("torch.distributed."):
            return True
        if package != "torch" and name != __name__:  # another of these modes
            return package == "toolkit"
    return False


@contextlib.contextmanager
def check_hooks(model: Any) -> Iterator[None]:
    """Makes hooks of modules, and those that tensors get within this context, raise UserError in their first backward
    pass if they do not commute with a factor."""
    tables = [(name or "the model", table) for name, part in unwrapped(model).named_modules()
              for table in (part._backward_hooks, part._backward_pre_hooks)]  # fmt: skip
    tables += [
        ("every module", require(module, f"_global_backward_{kind}", "torch"))
        for kind in ("hooks", "pre_hooks")
    ]
    for name, table in tables:
        table.update({key: _checked(hook, name) for key, hook in table.items()})
    tensors: Any = torch.Tensor
    register = tensors.register_hook

    def register_checked(tensor: torch.Tensor, hook: Any) -> Any:
        return register(
            tensor,
            hook if _called_by_strategy() else _checked(hook, f"a tensor {tuple(tensor.shape)}"),
        )

    tensors.register_hook = register_checked
    try:
        yield
    finally:
        tensors.register_hook = register


def check_functions(losses: torch.Tensor) -> None:
    """The same for a recipe's `autograd.Function` without saved tensors: with those its backward may have effects."""
    for node in autograd_nodes(losses):
        # `saved_tensors` would recompute a layer with gradient checkpointing
        if isinstance(node, BackwardCFunction) and not require(node, "_raw_saved_tensors", "torch"):
            function = require(node, "_forward_cls", "torch")
            if function.__module__.partition(".")[0] not in _LIBRARIES:
                checked = _checked(node.apply, function.__name__)
                node.register_prehook(
                    lambda gradients, checked=checked: (checked(*gradients), None)[1]
                )


def _checked(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`hook` of a tensor (gradient) or a module (module, gradients, ...), which is checked with its first gradients."""
    unchecked = [hook]

    def checked(*arguments: Any) -> Any:
        if unchecked:
            half = any(
                each.dtype == torch.float16
                for each in tree_leaves(arguments)
                if torch.is_tensor(each)
            )
            factor = 2.0**4 if half else 2.0**20
            for one, scaled in zip(
                *(_gradients(hook, arguments, times) for times in (1.0, factor)), strict=True
            ):
                unchecked.clear()
                if (one.float() * factor - scaled.float()).norm() > 1e-3 * scaled.float().norm():
                    raise UserError(f"{name}: {UNEVEN_HOOK}")
        return hook(*arguments)

    return checked


def _gradients(hook: Callable[..., Any], arguments: Any, factor: float) -> list[torch.Tensor]:
    """What a hook makes of gradients times a factor, in place or not."""
    copies = tree_map_only(torch.Tensor, lambda each: each * factor, arguments)
    result = hook(*copies)
    leaves = tree_leaves(
        (*copies, *copies)[1] if result is None else result
    )  # a module's comes first
    return [each for each in leaves if torch.is_tensor(each)]
