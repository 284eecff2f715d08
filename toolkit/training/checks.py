"""Cheap checks of what an edited recipe most often gets wrong: calls are counted, and shapes and
types compared. `toolkit verify RECIPE` finds the rest: it trains under every strategy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.errors import Faults, UserError, listing
from toolkit.launch.strategy import strategy_name
from toolkit.training.optimizer import unwrapped_optimizer
from toolkit.training.verified import is_verified
from toolkit.utils.modules import unwrapped

ELEMENTWISE = {
    "torch": {
        "Adadelta",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "SGD",
    },
    "deepspeed": {"DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion"},
}
"""Package -> its optimizers that compute the same from shards of parameters. (DeepSpeed replaces an
Adagrad by its own, without parameter groups.)"""

HALF = (torch.bfloat16, torch.float16)
TOKENS = "_toolkit_tokens"
"""Attribute of a tokenizer: its size when it read the data."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raises UserError for tokens that were added after the texts were tokenized."""
    added = len(tokenizer) - getattr(tokenizer, TOKENS, len(tokenizer))
    if added:
        remedy = "save it with its resized model to a folder, and pass --model_name_or_path FOLDER"
        raise UserError(f"{added} tokens were added after the data was loaded: {remedy}")


def check_before_prepare(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Raises UserError, with all faults, unless the optimizer has exactly the parameters that the
    model trains, in fp32, and can compute their updates from this strategy's shards."""
    faults = Faults()
    names = {id(each): name for name, each in model.named_parameters()}
    optimized = {
        id(each): each for group in optimizer.param_groups for each in group["params"]
    }
    foreign = [
        str(tuple(each.shape)) for key, each in optimized.items() if key not in names
    ]
    if foreign:
        what = f"the optimizer has parameters of shape {listing(foreign, 4)}, the model has not"
        faults.add(f"{what}: make them part of the model, or no checkpoint has them")
    trained = [
        (name, each) for name, each in model.named_parameters() if each.requires_grad
    ]
    missing = [name for name, each in trained if id(each) not in optimized]
    if missing:
        remedy = "freeze parameters before you create it, and pass it all others"
        faults.add(f"the optimizer lacks {listing(missing, 4)}: {remedy}")
    half = [name for name, each in trained if each.dtype in HALF]
    if half:
        faults.add(
            f"{listing(half, 4)}: 16 bits lose small updates: load the model in fp32"
        )
    if any("_orig_mod." in name for name in names.values()):
        faults.add(
            "torch.compile renames the model's weights: pass --torch_compile true instead"
        )
    kind = type(optimizer)
    strategy = strategy_name(accelerator)
    is_elementwise = kind.__name__ in ELEMENTWISE.get(kind.__module__.partition(".")[0], ())
    is_safe = strategy in ("single", "ddp") or is_elementwise
    if not is_safe:
        is_safe = is_verified(strategy)  # a collective: all ranks have the same optimizer
    if not is_safe:
        what = f"{kind.__name__} may compute other updates from {strategy}'s shards of parameters"
        faults.add(f"{what}: launch with ddp, or run `toolkit verify` on this recipe first")
    faults.raise_if_any()


class LoopChecks:
    """The checks of one run's loop. Its methods raise UserError."""

    def __init__(self) -> None:
        self._model: Any = None
        self._weights: list[tuple[str, torch.nn.Parameter, bool, torch.dtype]] = []
        """(name, parameter, whether it is trained, type) when they were prepared."""
        self._step = 0
        """The step's number; 0 between two steps."""
        self._calls = Counter[str]()
        """Of this step; forward passes: since the last `Step.mean`."""

    def watch(self, model: Any, optimizer: Any) -> None:
        """`model`, `optimizer`: as `accelerator.prepare` returned them."""
        self._model = model
        items = unwrapped(model).named_parameters()
        self._weights = [
            (name, each, each.requires_grad, each.dtype) for name, each in items
        ]
        model.register_forward_pre_hook(lambda *_: self._count_forward())
        plain = unwrapped_optimizer(optimizer)
        plain.register_step_post_hook(lambda *_: self._calls.update(["update"]))

    def _count_forward(self) -> None:
        self._calls["forward"] += 1
        if not self._step and unwrapped(self._model).training:
            raise UserError(
                "the model is evaluated with dropout: begin with `model.eval()`"
            )

    def begin_step(self, number: int, model: Any) -> None:
        self._step = number
        self._calls.clear()
        if model is not self._model:
            raise self._fault("pass `step.micro_batches` the model that `prepare` returned")
        for name, each, trains, dtype in self._weights:
            if each.requires_grad is not trains or each.dtype != dtype:
                remedy = "freeze or convert before the optimizer is created"
                raise self._fault(
                    f"requires_grad or the type of {name} has changed: {remedy}"
                )
            if each.grad is not None and bool(each.grad.any()):
                raise self._fault(
                    "it begins with old gradients: call `optimizer.zero_grad()`"
                )

    def check_losses(self, losses: torch.Tensor, samples: int) -> None:
        """Checks the losses (B,) of a micro-batch with `samples` samples."""
        if losses.shape != (samples,) or losses.dtype in HALF or not losses.requires_grad:
            what = f"{samples} losses with gradients, not {tuple(losses.shape)} in {losses.dtype}"
            remedy = "reduction='none', `logits.float()`, without a mean, `no_grad` or `.detach()`"
            raise self._fault(f"`step.mean` takes {what}: use {remedy}")
        if not self._calls["forward"]:
            raise self._fault(
                "call the model that `prepare` returned, not a part of it instead"
            )

    def expect_backward(self, mean_loss: torch.Tensor) -> None:
        """Counts the backward passes of a micro-batch's loss."""
        self._calls["mean"] += 1
        self._calls["forward"] = 0
        mean_loss.register_hook(lambda _: self._calls.update(["backward"]))

    def end_step(self, micro_batches: int, schedule_steps: int, was_skipped: bool) -> None:
        """`schedule_steps`: those of the schedule in this step. `was_skipped`: by fp16."""
        if not was_skipped:
            if not self._calls["update"]:
                remedy = "call `accelerator.backward(...)` and `optimizer.step()`"
                raise self._fault(f"the weights were not updated: {remedy}")
            if schedule_steps != 1:
                remedy = "call `scheduler.step()` once, after `optimizer.step()`"
                raise self._fault(f"the schedule made {schedule_steps} steps: {remedy}")
        means, passes = self._calls["mean"], self._calls["backward"]
        if not micro_batches == means == passes:
            calls = f"{means} means, {passes} backward passes"
            raise self._fault(f"{calls} in {micro_batches} micro-batches: make one each")
        self._calls.clear()
        self._step = 0

    def _fault(self, what: str) -> UserError:
        return UserError(f"step {self._step}: {what}")
