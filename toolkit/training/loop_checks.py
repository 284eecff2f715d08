"""Checks of the training loop, which users edit: what would train otherwise under another strategy is an error in its
first steps."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from toolkit.errors import UserError, listing
from toolkit.training.checks import HOW_TO_FREEZE, LOSS_PARAMETERS, not_in_loss, not_in_model, prepared
from toolkit.utils.compat import require
from toolkit.utils.modules import autograd_leaves, unwrapped

REMEDY_IN_FORWARD = f"compute with them there ({LOSS_PARAMETERS})"
REMEDY_IN_OPTIMIZER = "use `step` of your optimizer (for an average --ema_decay), or launch with ddp"
_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_NO_CHANGE = {"requires_grad_", "detach_", "share_memory_"}


class LoopChecks:
    """The checks of one run. Methods raise UserError where the loop has not called what it must."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._step = 0
        self._micro_batches = self._means = self._backwards = 0
        """So far in this step: yielded; calls of `Step.mean` and `accelerator.backward`."""
        self.mean_loss: torch.Tensor | None = None
        """The last result of `Step.mean`, until it is passed to `accelerator.backward`."""
        self._unscaled = False
        """Whether `accelerator.clip_grad_norm_` has removed fp16's loss scale from this step's gradients."""
        self._accumulates: torch.nn.Module | None = None
        """The model, where each micro-batch adds to its parameters' `grad`."""
        self._forwards: list[None] | None = None
        """An item for each call of the model in the first micro-batch; None before that."""
        self._in_first = contextlib.ExitStack()
        """Checks that end with the forward pass of the first micro-batch."""
        self._after_backward = contextlib.ExitStack()
        """Checks from the last backward pass of the first step to its end."""
        self._model: torch.nn.Module | None = None
        """The model, in the first step."""

    @contextlib.contextmanager
    def patch_accelerator(self) -> Iterator[None]:
        """Within this context `accelerator.backward` and the first step's `accelerator.gather` are checked; clipping
        a step's gradients again does not remove fp16's loss scale again, which torch refuses."""
        accelerator: Any = self.accelerator
        backward, unscale, gather = accelerator.backward, accelerator.unscale_gradients, accelerator.gather

        def checked_backward(loss: torch.Tensor, **options: Any) -> None:
            self._check_backward(loss)
            backward(loss, **options)
            if self._model is not None and accelerator.state.deepspeed_plugin and accelerator.sync_gradients:
                self._after_backward.enter_context(refuse_shards(self._model, REMEDY_IN_OPTIMIZER))
                self._after_backward.enter_context(_RefuseChanges(self._model))

        def unscale_once(optimizer: Any = None) -> None:
            if not self._unscaled:
                self._refuse_backwards(self._micro_batches)
                self._unscaled = True
                unscale(optimizer)

        def checked_gather(tensor: Any) -> Any:
            if self._model is not None and accelerator.num_processes > 1:
                shapes = gather_object([[tuple(each.shape) for each in tree_leaves(tensor) if torch.is_tensor(each)]])
                if any(each != shapes[0] for each in shapes):
                    raise UserError(
                        f"step {self._step}: accelerator.gather got other shapes in other processes: "
                        f"{listing(map(str, shapes), 4)}: use `accelerator.reduce` of sums"
                    )
            return gather(tensor)

        vars(accelerator).update(backward=checked_backward, unscale_gradients=unscale_once, gather=checked_gather)
        try:
            yield
        finally:
            self._after_backward.close()
            vars(accelerator).update(backward=backward, unscale_gradients=unscale, gather=gather)

    def begin_step(self, number: int, model: torch.nn.Module, accumulates: bool) -> None:
        """`accumulates`: whether each micro-batch adds to the parameters' `grad`."""
        refuse_changes(model)
        if number == self._step and self.accelerator.state.deepspeed_plugin:
            raise UserError(
                f"step {number}: under DeepSpeed the optimizer steps with the last `accelerator.backward` of "
                "`step.micro_batches`, which can be used once in a step: launch with ddp (accelerate_configs/)"
            )
        if number == self._step and self._unscaled and self.accelerator.scaler is not None:
            raise UserError(
                f"step {number}: fp16's gradients can be clipped once in a step, after its last pass over "
                "`step.micro_batches`: clip there only, or pass --mixed_precision bf16"
            )
        self._step, self._micro_batches, self._means, self._backwards = number, 0, 0, 0
        self.mean_loss, self._unscaled, self._accumulates = None, False, None
        if self.accelerator.state.deepspeed_plugin:  # it resets gradients itself
            return
        parameters = prepared(model)[1] or model.parameters()  # without a search in each step
        if any(each.grad is not None and bool(each.grad.any()) for each in parameters):
            raise UserError(f"step {number} begins with old gradients: call `optimizer.zero_grad()` in each step")
        self._accumulates = model if accumulates else None

    @contextlib.contextmanager
    def micro_batch(self, model: torch.nn.Module) -> Iterator[None]:
        self._micro_batches += 1
        with self._in_first:
            if self._forwards is None:
                self._model, forwards = model, list[None]()
                self._forwards = forwards
                self._in_first.enter_context(refuse_shards(model))
                hook = model.register_forward_pre_hook(lambda *_: forwards.append(None))
                self._in_first.callback(hook.remove)
            yield

    def check_losses(self, losses: torch.Tensor) -> None:
        """Of a micro-batch (B,), in `Step.mean`."""
        if losses.dtype in (torch.bfloat16, torch.float16):
            raise UserError(f"step.mean() got losses in {losses.dtype}: compute them in fp32, from `logits.float()`")
        self._refuse_means(self._micro_batches - 1)
        model = self._accumulates if self._means else None  # `bool` of a compiled model takes its length
        # after a forward pass FSDP2's root has unsharded parameters, without gradients: take those of the first step
        sharded = prepared(model)[1] if model is not None else []
        if model is not None and all(each.grad is None for each in sharded or model.parameters()):
            raise UserError(
                f"step {self._step}: the first micro-batch left no gradients: call `accelerator.backward` in each, and "
                "`optimizer.zero_grad()` only after `optimizer.step()`"
            )
        self._means += 1
        if self._model is None or self._means > 1:
            return
        # DDP and shards would average gradients of different parameters, or none
        refuse_foreign_parameters(self._model, losses, uses_all=self.accelerator.num_processes > 1)
        if not self._forwards:
            raise UserError(
                "call the model that `prepare` returned, not a part of it or `toolkit.unwrapped(model)`: gradients of "
                "such a call are not averaged over processes"
            )

    def _check_backward(self, loss: torch.Tensor) -> None:
        self._in_first.close()
        if loss is not self.mean_loss:
            raise UserError(
                f"step {self._step}: `accelerator.backward` takes what `step.mean` returned, once in each micro-batch; "
                "add terms to the losses, `step.mean(losses + term)`: to the mean they would add once per micro-batch"
            )
        self.mean_loss = None
        self._backwards += 1

    def end_step(self, number: int, micro_batches: int) -> None:
        """Before the metrics of a step with `micro_batches` are gathered."""
        self._after_backward.close()
        self._model = None
        if number != self._step:  # none of them was computed
            self._step, self._means = number, 0
        self._refuse_means(micro_batches)
        self._refuse_backwards(micro_batches)
        if self.accelerator.scaler is not None and not self._unscaled:
            raise UserError(
                f"step {self._step}: fp16's gradients were clipped before their scale was removed, or not at all: call "
                "`accelerator.clip_grad_norm_`, which removes it"
            )
        if not self.accelerator.sync_gradients:
            raise UserError(f"step {self._step}: gradients were not synchronised: leave out `accelerator.accumulate`")

    def _refuse_means(self, expected: int) -> None:
        if self._means != expected:
            times = "a second time" if self._means > expected else f"in {self._means} of {expected} micro-batches"
            raise UserError(
                f"step {self._step}: step.mean() was called {times}: call it once in each micro-batch, with the sum of "
                "all losses (B,): `accelerator.backward(step.mean(losses))`"
            )

    def _refuse_backwards(self, expected: int) -> None:
        if self._backwards < expected:
            raise UserError(
                f"step {self._step}: `accelerator.backward` was called {self._backwards} times in {expected} "
                "micro-batches: call it in each, not `.backward()`, since it scales the gradients"
            )


def refuse_changes(model: Any) -> None:
    """Raises UserError where `requires_grad` of a parameter has changed since the model was prepared, or a parameter
    was added: a strategy allocates gradients and masters in `prepare`. Cheap enough for each step."""
    module = unwrapped(model)
    before, parameters = prepared(module)
    if before and not parameters:
        parameters.extend(module.parameters())  # FSDP2 replaces them
        if len(parameters) > len(before):
            added = [name for name, _ in module.named_parameters() if name not in dict(before)]
            raise UserError(f"add parameters to the model before the optimizer and `prepare`: {listing(added, 4)}")
    pairs = zip(before, parameters, strict=False)
    if changed := [name for (name, trained), parameter in pairs if parameter.requires_grad is not trained]:
        raise UserError(f"requires_grad has changed since `prepare`: {listing(changed, 4)}. {HOW_TO_FREEZE}")


def refuse_foreign_parameters(model: Any, losses: torch.Tensor, uses_all: bool = False) -> None:
    """Raises UserError where losses depend on parameters outside the model; with `uses_all` also where they do not
    depend on all trained ones."""
    module = unwrapped(model)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for part in module.modules():
        if isinstance(part, FSDPModule):  # it computes with gathered copies
            for group in require(part, "_get_fsdp_state", "torch")()._fsdp_param_groups:
                copies = (each for each in group.fsdp_params if hasattr(each, "_unsharded_param"))
                names |= {id(each._unsharded_param): each._param_fqn for each in copies}
    leaves = [leaf for leaf in autograd_leaves(losses) if isinstance(leaf, torch.nn.Parameter)]
    if foreign := [leaf for leaf in leaves if id(leaf) not in names]:
        raise UserError(f"the loss has {not_in_model(foreign)}")
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    used = {names[id(leaf)] for leaf in leaves}
    if uses_all and (unused := [name for name in trained if name not in used]):
        raise UserError(not_in_loss(unused))


@contextlib.contextmanager
def refuse_shards(model: Any, remedy: str = REMEDY_IN_FORWARD) -> Iterator[None]:
    """Within this context computing with a sharded parameter (ZeRO-3, FSDP2) outside the model's forward raises
    UserError, which ends with `remedy`. ZeRO-3 leaves such a parameter empty: its sum is 0, and most other operations
    fail on its shape."""
    parameters = unwrapped(model).named_parameters()
    names = {id(each): name for name, each in parameters if hasattr(each, "ds_status") or isinstance(each, DTensor)}
    if not names:
        yield
        return
    mode = _RefuseShards(names, remedy)
    hooks = [model.register_forward_pre_hook(mode.suspend), model.register_forward_hook(mode.resume, always_call=True)]
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _RefuseShards(TorchFunctionMode):
    def __init__(self, names: dict[int, str], remedy: str) -> None:
        super().__init__()
        self.names, self.remedy = names, remedy

    def suspend(self, *_: Any) -> None:
        self.__exit__(None, None, None)

    def resume(self, *_: Any) -> None:
        self.__enter__()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parameters = (each for each in tree_leaves((args, kwargs)) if id(each) in self.names)
        sharded = [each for each in parameters if isinstance(each, DTensor) or each.ds_status.name == "NOT_AVAILABLE"]
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


class _RefuseChanges(TorchFunctionMode):
    """Refuses the recipe's changes of weights and uses of `grad` under DeepSpeed, which computes both from its own
    copies: a change of a weight is overwritten in the next step, and `grad` is None."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        trained = [(name, each) for name, each in unwrapped(model).named_parameters() if each.requires_grad]
        self.names = {id(each): name for name, each in trained}
        self.weights = {each.untyped_storage().data_ptr(): name for name, each in trained if each.numel()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Whether DeepSpeed, Accelerate or FSDP2 is the caller, and not the recipe."""
    frame: Any = sys._getframe(2)
    while frame and (inner := re.search(r"/(torch|deepspeed|accelerate)/(distributed/)?", frame.f_code.co_filename)):
        if inner[1] != "torch" or inner[2]:
            return True
        frame = frame.f_back
    return False
