"""Checks of the training loop, which users edit: what would train otherwise under another strategy is an error in its
first steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from toolkit.checkpoint.parameters import floating_buffers, reshard
from toolkit.errors import UserError, listing
from toolkit.launch import log_on_main
from toolkit.training import checks
from toolkit.training.checks import HOW_TO_FREEZE, not_in_loss, not_in_model, prepared
from toolkit.training.shard_checks import (
    REMEDY_IN_OPTIMIZER,
    RefuseChanges,
    RefuseLocalNumbers,
    check_functions,
    check_hooks,
    refuse_shards,
    refuse_stale_parameters,
)
from toolkit.utils.compat import require
from toolkit.utils.modules import autograd_nodes, unwrapped


class LoopChecks:
    """The checks of one run. Methods raise UserError if the loop has not called what it must."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._first: int | None = None
        """The number of this process's first step."""
        self._step = 0
        self._micro_batches = self._means = self._backwards = 0
        """So far in this step: yielded; calls of `Step.mean` and `accelerator.backward`."""
        self.mean_loss: torch.Tensor | None = None
        """The last result of `Step.mean`, until it is passed to `accelerator.backward`."""
        self._unscaled = False
        """Whether `accelerator.clip_grad_norm_` has removed fp16's loss scale from this step's gradients."""
        self.stepped = False
        """Whether the recipe has called `optimizer.step` in this step; DeepSpeed steps without it."""
        self._in_step: bool | None = None
        """Whether that call has not returned: an optimizer may step others that it wraps. None until
        `watch_optimizer`."""
        self._learning_rates: Callable[[], list[float]] = list
        self._rates: list[float] = []
        """The learning rates with which DeepSpeed has stepped."""
        self._accumulates: torch.nn.Module | None = None
        """The model, if each micro-batch accumulates into its parameters' `grad`."""
        self._weights: dict[str, tuple[int, float]] = {}
        """Checksums of the weights that DeepSpeed has copied."""
        self._gradients: dict[str, tuple[int, float]] = {}
        """Checksums of the first step's gradients while fp16's loss scale is in them."""
        self._unchecked: torch.nn.Module | None = None
        """The model, until the loss of the first micro-batch is checked."""
        self._buffers: dict[str, torch.Tensor] = {}
        """Copies of the model's buffers before its first forward pass."""
        self._forwards: list[None] = []
        """An item for each call of the model in the first micro-batch."""
        self._outputs: dict[Any, Any] = {}
        """Autograd node of each output of the model in this micro-batch -> its place."""
        self._uses = set[Any]()
        """The outputs, and parameters beside them, on which the first micro-batch's losses depend."""
        self._in_forward = contextlib.ExitStack()
        """Checks that end with the forward pass of a micro-batch."""
        self._after_backward = contextlib.ExitStack()
        """Checks from the last backward pass of a step to the next step."""
        self._model: Any = None
        """The model, in a step."""
        self._dtypes = set[torch.dtype]()
        """Those of the parameters in the first step."""

    @contextlib.contextmanager
    def patch_accelerator(self) -> Iterator[None]:
        """Within this context `accelerator.backward` and a step's `accelerator.gather` are checked; clipping
        a step's gradients again does not remove fp16's loss scale again, which torch refuses."""
        accelerator: Any = self.accelerator
        backward, unscale, gather = (
            accelerator.backward,
            accelerator.unscale_gradients,
            accelerator.gather,
        )

        def checked_backward(loss: torch.Tensor, **options: Any) -> None:
            self._check_backward(loss)
            backward(loss, **options)
            self._rates = self._learning_rates()
            first = self._first == self._step  # a mode slows down the step of FSDP2's optimizer
            if (first or accelerator.state.deepspeed_plugin) and accelerator.sync_gradients:
                self.watch_weights(self._model)
                if accelerator.scaler is not None:
                    self._gradients = _checksums(_gradients_of(unwrapped(self._model)))

        def unscale_once(optimizer: Any = None) -> None:
            if not self._unscaled:
                if self.stepped:
                    raise UserError(
                        f"step {self._step}: call `accelerator.clip_grad_norm_` before `optimizer.step()`"
                    )
                self._refuse_backwards(self._micro_batches)
                if self._gradients and self._gradients != _checksums(
                    _gradients_of(unwrapped(self._model))
                ):
                    raise UserError(
                        f"step {self._step}: gradients were changed before fp16's loss scale was removed: call "
                        "`accelerator.clip_grad_norm_` first, or pass --mixed_precision bf16"
                    )
                self._unscaled = True
                unscale(optimizer)

        def checked_gather(tensor: Any) -> Any:
            if self._micro_batches and accelerator.num_processes > 1:
                shapes = gather_object(
                    [[tuple(each.shape) for each in tree_leaves(tensor) if torch.is_tensor(each)]]
                )
                if any(each != shapes[0] for each in shapes):
                    raise UserError(
                        f"step {self._step}: accelerator.gather got different shapes in different processes: "
                        f"{listing(map(str, shapes), 4)}: use `accelerator.reduce` of sums"
                    )
            return gather(tensor)

        def refuse_accumulate(*_: Any) -> None:
            raise UserError(
                f"step {self._step}: leave out `accelerator.accumulate`: `step.micro_batches` accumulates"
            )

        before = backward, unscale, gather, accelerator.accumulate
        checked = checked_backward, unscale_once, checked_gather, refuse_accumulate
        names = "backward", "unscale_gradients", "gather", "accumulate"
        vars(accelerator).update(zip(names, checked, strict=True))
        try:
            yield
        finally:
            self._after_backward.close()
            vars(accelerator).update(zip(names, before, strict=True))

    def watch_optimizer(self, optimizer: Any) -> None:
        """Checks calls of `optimizer.step`, from now on."""
        step, self._in_step = optimizer.step, False
        self._learning_rates = lambda: [group["lr"] for group in optimizer.param_groups]

        def checked_step(_: Any, *arguments: Any, **options: Any) -> Any:
            if self.accelerator.sync_gradients:
                if self.stepped:
                    raise UserError(f"step {self._step}: call `optimizer.step()` once in each step")
                if (
                    self.accelerator.state.deepspeed_plugin
                    and self._rates != self._learning_rates()
                ):
                    raise UserError(
                        f"step {self._step}: DeepSpeed has stepped when `accelerator.backward` returns: change "
                        "learning rates before `step.micro_batches` or after `optimizer.step()`"
                    )
                self.stepped = True
            self._in_step = True
            try:
                return step(*arguments, **options)
            finally:
                self._in_step = False

        optimizer.step = MethodType(
            checked_step, optimizer
        )  # a scheduler of torch takes its __func__

    def begin_step(self, number: int, model: torch.nn.Module, accumulates: bool) -> None:
        """`accumulates`: whether each micro-batch adds to the parameters' `grad`."""
        self._after_backward.close()
        refuse_changes(model, first=self._first is None)
        if self._first is None:
            self._check_weights(unwrapped(model))
            if fault := checks.hook_fault(self.accelerator, checks.parameters_of(model)):
                raise UserError(fault)
            self._dtypes = {each.dtype for _, each in checks.parameters_of(model)}
        if not unwrapped(model).training:
            raise UserError(
                f"step {number} begins without dropout: call `model.train()` in each step, or --dropout 0"
            )
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
        self.mean_loss, self._unscaled, self._accumulates, self.stepped = None, False, None, False
        if self.accelerator.state.deepspeed_plugin:  # it resets gradients itself
            return
        parameters = prepared(model)[1] or model.parameters()  # without a search in each step
        if any(each.grad is not None and bool(each.grad.any()) for each in parameters):
            raise UserError(
                f"step {number} begins with old gradients: call `optimizer.zero_grad()` in each step"
            )
        self._accumulates = model if accumulates else None

    def remember_weights(self, model: torch.nn.Module) -> None:
        """DeepSpeed has copied them, or a checkpoint has set both: until the first step they must not change."""
        if self.accelerator.state.deepspeed_plugin:
            self._weights = _checksums(_trained(unwrapped(model)))

    def _check_weights(self, model: torch.nn.Module) -> None:
        """Refuses weights that have changed before the first step."""
        half = self.accelerator.state.deepspeed_plugin and self.accelerator.mixed_precision != "no"
        if not half and (fault := checks.low_precision_fault(model)):
            raise UserError(fault)
        weights = _checksums(_trained(model)) if self._weights else {}
        if changed := [
            name for name, checksum in self._weights.items() if weights.get(name) != checksum
        ]:
            raise UserError(
                f"{listing(changed, 4)}: DeepSpeed trains copies of the weights passed to `prepare`: change weights "
                "before `prepare`, or launch with ddp"
            )

    def watch_weights(self, model: torch.nn.Module) -> None:
        """Until the next step, refuses uses of weights that are wrong with DeepSpeed's copies and FSDP2's shards, and
        steps of an optimizer that no checkpoint saves."""
        self._after_backward.close()
        if self.accelerator.is_fsdp2:
            self._after_backward.enter_context(RefuseLocalNumbers())
            self._after_backward.callback(
                register_optimizer_step_pre_hook(refuse_stale_parameters).remove
            )
        elif self.accelerator.state.deepspeed_plugin:
            self._after_backward.enter_context(refuse_shards(model, REMEDY_IN_OPTIMIZER))
            self._after_backward.enter_context(RefuseChanges(model))
        self._after_backward.callback(register_optimizer_step_pre_hook(self._refuse_unsaved).remove)

    def _refuse_unsaved(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        registered = require(self.accelerator, "_custom_objects", "accelerate")
        if self._in_step is False and all(each is not optimizer for each in registered):
            raise UserError(
                f"step {self._step}: no checkpoint has the state of the second optimizer, {type(optimizer).__name__}: "
                "pass it to `accelerator.register_for_checkpointing` before `run.resume`"
            )

    def refuse_wrong_evaluation(self, model: torch.nn.Module, _: Any) -> None:
        """Refuses dropout, and weights of another type, in an evaluation; a hook before its forward pass."""
        if model.training:
            raise UserError("`evaluate` computes with dropout: begin it with `model.eval()`")
        dtypes = {each.dtype for _, each in checks.parameters_of(model)}
        if self._dtypes and dtypes != self._dtypes:
            types = f"{listing(map(str, dtypes), 4)}, not {listing(map(str, self._dtypes), 4)}"
            raise UserError(
                f"`evaluate` changes the weights' type ({types}), and rounds them: pass --mixed_precision"
            )

    @contextlib.contextmanager
    def micro_batch(self, model: torch.nn.Module) -> Iterator[None]:
        self._micro_batches += 1
        with self._in_forward:
            if self._first is None:
                self._first, self._unchecked = self._step, model
                self._buffers = {
                    name: each.clone() for name, each in floating_buffers(unwrapped(model))
                }
                count = model.register_forward_pre_hook(lambda *_: self._forwards.append(None))
                self._in_forward.enter_context(count)
                self._in_forward.enter_context(check_hooks(model))
            if self.accelerator.num_processes > 1:
                self._in_forward.enter_context(model.register_forward_hook(self._remember_outputs))
            self._model, plugin = model, self.accelerator.state.deepspeed_plugin
            if self.accelerator.is_fsdp2 or (plugin and plugin.zero_stage == 3):
                self._in_forward.enter_context(refuse_shards(model))
            yield

    def _remember_outputs(self, _: Any, __: Any, outputs: Any) -> None:
        places = enumerate(tree_leaves(outputs))
        self._outputs |= {
            each.grad_fn: place
            for place, each in places
            if torch.is_tensor(each) and each.requires_grad
        }

    def check_losses(self, losses: torch.Tensor) -> None:
        """Checks a micro-batch's losses (B,); called by `Step.mean`."""
        if losses.dtype in (torch.bfloat16, torch.float16):
            raise UserError(
                f"step.mean() got losses in {losses.dtype}: compute them in fp32, from `logits.float()`"
            )
        if not losses.requires_grad:
            raise UserError(
                "step.mean() got losses without gradients: leave out `torch.no_grad()` and `.detach()`"
            )
        self._refuse_means(self._micro_batches - 1)
        model = (
            self._accumulates if self._means else None
        )  # `bool` of a compiled model takes its length
        # after a forward pass FSDP2's root has unsharded parameters, without gradients: take those of the first step
        sharded = prepared(model)[1] if model is not None else []
        if model is not None and all(each.grad is None for each in sharded or model.parameters()):
            raise UserError(
                f"step {self._step}: no gradients after the first micro-batch: call `accelerator.backward` in each, "
                "and `optimizer.zero_grad()` only after `optimizer.step()`"
            )
        self._means += 1
        nodes = autograd_nodes(losses, self._outputs) if self.accelerator.num_processes > 1 else []
        uses = {self._outputs[each] for each in nodes if each in self._outputs}
        leaves = (getattr(each, "variable", None) for each in nodes)
        uses |= {id(leaf) for leaf in leaves if isinstance(leaf, torch.nn.Parameter)}
        self._outputs.clear()  # it would keep the graph
        if self._unchecked is None:
            if (
                not uses >= self._uses
            ):  # the model's layers may still use all: search the whole graph
                refuse_foreign_parameters(self._model, losses, uses_all=True)
            return
        self._uses = uses
        # DDP and shards would average gradients of different parameters, or none
        refuse_foreign_parameters(
            self._unchecked, losses, uses_all=self.accelerator.num_processes > 1
        )
        self._unchecked = None
        check_functions(losses)
        buffers, before = floating_buffers(unwrapped(self._model)), self._buffers
        if changed := [
            name
            for name, each in buffers
            if name in before and not torch.equal(each, before.pop(name))
        ]:
            why = "results depend on --per_device_batch_size and on the number of processes"
            log_on_main(
                self.accelerator,
                f"{listing(changed, 4)}: buffers that each micro-batch changes: {why}",
            )
        if not self._forwards:
            raise UserError(
                "call the model that `prepare` returned, not a part of it or `toolkit.unwrapped(model)`: gradients of "
                "such a call are not averaged over processes"
            )

    def _check_backward(self, loss: torch.Tensor) -> None:
        self._in_forward.close()
        if loss is not self.mean_loss:
            raise UserError(
                f"step {self._step}: pass the result of `step.mean` to `accelerator.backward`, once per micro-batch; "
                "add terms to the losses: `step.mean(losses + term)`"
            )
        self.mean_loss = None
        self._backwards += 1

    def end_step(self, number: int, micro_batches: int) -> None:
        """Checks a step with `micro_batches`, before its metrics are gathered."""
        self._after_backward.close()
        self._model, self._gradients = None, {}
        if number != self._step:  # none of them was computed
            self._step, self._means = number, 0
        self._refuse_means(micro_batches)
        self._refuse_backwards(micro_batches)
        self._micro_batches = 0
        if self.accelerator.scaler is not None and not self._unscaled:
            raise UserError(
                f"step {self._step}: fp16's gradients were clipped before their scale was removed, or not at all: call "
                "`accelerator.clip_grad_norm_`, which removes it"
            )

    def _refuse_means(self, expected: int) -> None:
        if self._means != expected:
            times = (
                "a second time"
                if self._means > expected
                else f"in {self._means} of {expected} micro-batches"
            )
            raise UserError(
                f"step {self._step}: step.mean() was called {times}: call it once in each micro-batch, with the sum of "
                "all losses (B,): `accelerator.backward(step.mean(losses))`"
            )

    def _refuse_backwards(self, expected: int) -> None:
        if self._backwards < expected:
            raise UserError(
                f"step {self._step}: `accelerator.backward` was called {self._backwards} times in {expected} "
                "micro-batches: call it in each, and not `.backward()`, which does not scale the gradients"
            )


def refuse_changes(model: Any, first: bool = False) -> None:
    """Raises UserError if `requires_grad` of a parameter has changed since the model was prepared, or, in the
    `first` step, if parameters were added or replaced: a strategy allocates gradients and masters in `prepare`.
    Cheap enough for each step."""
    module = unwrapped(model)
    before, parameters = prepared(module)
    if before and not parameters:
        parameters.extend(module.parameters())  # FSDP2 replaces them
        if len(parameters) > len(before):
            added = [name for name, _ in module.named_parameters() if name not in dict(before)]
            raise UserError(
                f"{listing(added, 4)}: untied by FSDP2 (launch with ddp or ZeRO), or added after the optimizer"
            )
    if before and first:
        reshard(module)  # FSDP2, after an evaluation
        names, known = (
            {id(each): name for name, each in module.named_parameters()},
            set(map(id, parameters)),
        )
        lost = [
            name
            for (name, _), each in zip(before, parameters, strict=False)
            if id(each) not in names
        ]
        if changed := [name for key, name in names.items() if key not in known] or lost:
            raise UserError(
                f"add, replace or tie parameters before the optimizer and `prepare`: {listing(changed, 4)}"
            )
    pairs = zip(before, parameters, strict=False)
    if changed := [
        name for (name, trained), parameter in pairs if parameter.requires_grad is not trained
    ]:
        raise UserError(
            f"requires_grad has changed since `prepare`: {listing(changed, 4)}. {HOW_TO_FREEZE}"
        )


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)


def _gradients_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, each.grad) for name, each in model.named_parameters() if each.grad is not None)


def _checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, float]]:
    """(changes that torch has counted, checksum of this process's part) of each. A parameter of ZeRO-3 may be empty:
    then only the first shows a change."""
    checksums: dict[str, tuple[int, float]] = {}
    for name, each in tensors:
        part = getattr(each, "ds_tensor", each).detach()
        part = part.to_local() if isinstance(part, DTensor) else part
        checksums[name] = (
            each._version,
            torch.hash_tensor(part).view(torch.int64).item() if part.numel() else 0,
        )
    return checksums


def refuse_different_weights(model: torch.nn.Module) -> None:
    """Raises UserError if processes would give FSDP2 shards of different weights: DDP and ZeRO take rank 0's."""
    parameters = (
        (name, each.detach()) for name, each in model.named_parameters() if not each.is_meta
    )
    weights = {
        name: each.flatten()[:4].view(torch.uint8).tolist() for name, each in parameters
    }  # nan equals nan
    ranks = gather_object([weights])
    if names := [
        name
        for name in weights
        if any(rank.get(name, weights[name]) != weights[name] for rank in ranks)
    ]:
        raise UserError(
            f"{listing(names, 4)}: not equal in all processes: initialize weights with one seed"
        )


def refuse_foreign_parameters(model: Any, losses: torch.Tensor, uses_all: bool = False) -> None:
    """Raises UserError if losses depend on parameters outside the model; with `uses_all` also if they do not
    depend on all trained ones."""
    module = unwrapped(model)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for part in module.modules():
        if isinstance(part, FSDPModule):  # it computes with gathered copies
            for group in require(part, "_get_fsdp_state", "torch")()._fsdp_param_groups:
                copies = (each for each in group.fsdp_params if hasattr(each, "_unsharded_param"))
                names |= {id(each._unsharded_param): each._param_fqn for each in copies}
    nodes = autograd_nodes(losses)
    leaves = [
        each.variable
        for each in nodes
        if isinstance(getattr(each, "variable", None), torch.nn.Parameter)
    ]
    if foreign := [leaf for leaf in leaves if id(leaf) not in names]:
        raise UserError(f"the loss has {not_in_model(foreign)}")
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    used = {names[id(leaf)] for leaf in leaves}
    if uses_all and any(type(each).__name__ == "CheckpointFunctionBackward" for each in nodes):
        raise UserError(
            "gradient checkpointing with use_reentrant=True hides parameters: use --gradient_checkpointing true"
        )
    if uses_all and (unused := [name for name in trained if name not in used]):
        raise UserError(not_in_loss(unused))
