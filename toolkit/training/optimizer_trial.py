"""Tests whether an optimizer works in the training loop, and computes the same updates from shards of parameters.

ZeRO concatenates the parameters of a group, gives each process one slice of that, and steps one group after the other.
FSDP2 shards each parameter by rows. Elementwise optimizers compute the same from shards. Those that use a parameter's
rows, columns, norm or number of dimensions, use all parameters together, or count their calls, silently compute
something else. So a copy of the optimizer takes a few steps on small parameters, unsharded and sharded.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from toolkit.errors import first_line

# (maximum rows of a small parameter, steps). RAdam changes its update at the 6th step, a Lookahead at the 5th or 6th,
# SOAP and AdaShift at the 11th. Variants of Adafactor keep rows and columns from 128 on; for that size Shampoo would
# keep a matrix of gigabytes, but the first trial has rejected it
_TRIALS = ((12, 12), (130, 3))
_MAX_COPIES = 2  # parameters per group, and groups that differ only in their learning rate
_TOLERANCE = 1e-4  # relative to an update's norm; fp32 rounding is a hundredth of that

Sharding = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Parameters of a group -> one process's shards of them."""


class _CannotTryError(Exception):
    """The optimizer cannot be copied to small parameters."""


def step_fault(optimizer: Optimizer, device: torch.device, *arguments: None) -> str:
    """The error of `optimizer.step(*arguments)` in the loop (it needs a closure, say, or sparse gradients); empty if
    it works, or the optimizer cannot be copied."""
    with _fixed_seed(device), contextlib.suppress(_CannotTryError):
        rows, steps = _TRIALS[0]
        trial = _copy_of(optimizer, device, rows)
        try:
            groups = trial.param_groups
            trial.load_state_dict(trial.state_dict())  # as accelerate does
            for number in range(steps):
                _set_gradients(trial, number)
                trial.step(*arguments)
            return _stale_groups(trial, groups)
        except Exception as error:
            return first_line(error)
    return ""


def _stale_groups(optimizer: Optimizer, old: list[dict[str, Any]]) -> str:
    """Why learning rates do not reach an optimizer that this one wraps; empty if they do. `old`: the groups before a
    state was loaded."""
    stale = {id(group) for group in old} - {id(group) for group in optimizer.param_groups}
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer) and any(id(group) in stale for group in inner.param_groups):
            remedy = "make `param_groups` and `state` properties that return those"
            return f"it has other param_groups than its {type(inner).__name__}: {remedy}"
    return ""


def resume_fault(optimizer: Optimizer, device: torch.device) -> str:
    """Why a resumed run would compute other updates than an uninterrupted one: the optimizer has state outside of
    `state` and `param_groups`, which is all that checkpoints have. Empty if it has not, or cannot be copied."""
    with _fixed_seed(device), contextlib.suppress(Exception):  # `step_fault` reports errors
        rows, steps = _TRIALS[0]
        trial, resumed = (_copy_of(optimizer, device, rows) for _ in range(2))
        for number in range(steps):
            _set_gradients(trial, number)
            trial.step()
        before = [
            [each.detach().clone() for each in group["params"]] for group in trial.param_groups
        ]
        resumed.state.update(
            {key: copy.deepcopy(each) for key, each in trial.state.items() if isinstance(key, str)}
        )
        for target, source in zip(resumed.param_groups, trial.param_groups, strict=True):
            target.update(
                copy.deepcopy({key: value for key, value in source.items() if key != "params"})
            )
            for one, other in zip(target["params"], source["params"], strict=True):
                one.data.copy_(other.data)
                if other in trial.state:
                    resumed.state[one] = {
                        key: copy.deepcopy(value) for key, value in trial.state[other].items()
                    }
        for key, value in vars(trial).items():  # begins again, with other numbers
            if isinstance(value, torch.Generator):
                vars(resumed)[key].set_state(value.get_state())
        for number in range(steps):
            for each in (trial, resumed):
                torch.manual_seed(number)
                _set_gradients(each, number)
                each.step()
            if _differs(resumed, trial, before, list):
                return f"resumed, it computed another step {number + 1} in a trial"
    return ""


def shard_fault(optimizer: Optimizer, device: torch.device, stage: int) -> str:
    """Why updates of shards in two processes differ from those of unsharded parameters; empty if they are equal.
    `stage`: of ZeRO; 0 for FSDP2."""
    try:
        for rows, steps in _TRIALS:
            with _fixed_seed(device):
                if number := _first_difference(optimizer, device, stage, rows, steps):
                    return f"its step {number} differed in a trial"
    except _CannotTryError as error:
        return str(error)
    except Exception as error:
        return f"a trial raised {type(error).__name__}: {first_line(error)}"
    return ""


def _first_difference(
    optimizer: Optimizer, device: torch.device, stage: int, rows: int, steps: int
) -> int:
    """The number of the first step that differs with shards; 0 if all are equal."""
    unsharded = _copy_of(optimizer, device, rows)
    before = [
        [each.detach().clone() for each in group["params"]] for group in unsharded.param_groups
    ]
    trials = [(_copy_of(optimizer, device, rows), shard) for shard in _shardings(device, stage)]
    for trial, shard in trials:
        for group in trial.param_groups:
            group["params"] = [each.requires_grad_() for each in shard(group["params"])]
    for number in range(steps):
        _set_gradients(unsharded, number)
        for trial, shard in trials:
            for group, source in zip(trial.param_groups, unsharded.param_groups, strict=True):
                gradients = shard([each.grad for each in source["params"]])
                for each, gradient in zip(group["params"], gradients, strict=True):
                    each.grad = gradient
            _step(trial, stage)
        unsharded.step()
        if any(_differs(trial, unsharded, before, shard) for trial, shard in trials):
            return number + 1
    return 0


def _shardings(device: torch.device, stage: int) -> list[Sharding]:
    """The shardings of two ranks; for FSDP2 also this process's DTensors, which some operations do not support."""
    shardings: list[Sharding] = [partial(_flat if stage else _rows, rank=rank) for rank in range(2)]
    if stage or not torch.distributed.is_initialized():
        return shardings
    mesh = DeviceMesh(device.type, list(range(torch.distributed.get_world_size())))
    return [*shardings, partial(_dtensors, mesh=mesh)]


@contextlib.contextmanager
def _fixed_seed(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _flat(tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """The first 3/7 of all elements, or the rest."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return [flat.tensor_split([flat.numel() * 3 // 7])[rank].clone()]


def _rows(tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    rows = (torch.atleast_1d(tensor.detach()) for tensor in tensors)
    return [each.tensor_split([(len(each) + 1) // 2])[rank].clone() for each in rows]


def _dtensors(tensors: list[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    return [
        distribute_tensor(each.detach().clone(), mesh, [Shard(0)], src_data_rank=None)
        for each in tensors
    ]


def _step(optimizer: Optimizer, stage: int) -> None:
    """Steps as DeepSpeed does: one group at a time; stage 3 passes all groups, the others without parameters."""
    groups, shards = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    for place in range(len(groups) if stage else 1):
        for other, group in enumerate(groups):
            group["params"] = shards[other] if other == place or stage < 3 else []
        optimizer.param_groups = [groups[place]] if stage in (1, 2) else groups
        optimizer.step()
    optimizer.param_groups = groups
    for group, params in zip(groups, shards, strict=True):
        group["params"] = params


def _set_gradients(optimizer: Optimizer, number: int) -> None:
    """Sets gradients of step `number`: rows of different norms; in every second step orthogonal to the weights, as
    before a norm (AdamP tests for that); some very small and large ones, for optimizers that clip."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            rows = weight.detach().reshape(len(weight) if weight.dim() > 1 else 1, -1)
            gradient = (
                torch.randn(rows.shape).to(rows)
                * torch.linspace(0.5, 2, len(rows)).to(rows)[:, None]
            )
            if number % 2:
                squares = (rows * rows).sum(1, keepdim=True).clamp(min=1e-12)
                gradient -= rows * (gradient * rows).sum(1, keepdim=True) / squares
            weight.grad = gradient.reshape(weight.shape) * (0.1, 0.1, 1e-3, 10.0)[number % 4]


def _differs(
    trial: Optimizer, unsharded: Optimizer, before: list[list[torch.Tensor]], shard: Sharding
) -> bool:
    for group, source, start in zip(
        trial.param_groups, unsharded.param_groups, before, strict=True
    ):
        for tensors in zip(group["params"], shard(source["params"]), shard(start), strict=True):
            actual, expected, first = (
                each.to_local() if isinstance(each, DTensor) else each for each in tensors
            )
            rounded = 1e-6 * expected.norm()
            if (
                not (actual.detach() - expected).norm()
                <= _TOLERANCE * (expected - first).norm() + rounded
            ):
                return True
        # D-Adaptation and Prodigy estimate a step size, whose effect may still be too small to see
        if any(
            not math.isclose(_number(group.get(key)), _number(source[key]), rel_tol=_TOLERANCE)
            for key in source
        ):
            return True
    return False


def _number(value: Any) -> float:
    single = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
    return float(value) if single or isinstance(value, float) else 0.0


def _copy_of(optimizer: Optimizer, device: torch.device, rows: int) -> Any:
    """A copy of the optimizer with a few small parameters in place of its own. Raises _CannotTryError."""
    if hasattr(optimizer, "__del__"):  # deleting the copy would free them
        raise _CannotTryError(
            "it owns resources outside of Python, and cannot be copied for a trial"
        )
    memo: dict[int, Any] = {
        id(each): torch.empty(0) for group in optimizer.param_groups for each in group["params"]
    }
    state: dict[Any, Any] = defaultdict(dict)
    groups, copies = [], Counter[str]()
    for group in optimizer.param_groups:
        kind = repr(
            [
                (key, value)
                for key, value in group.items()
                if key not in ("params", "lr", "initial_lr")
            ]
        )
        if not group["params"] or copies[kind] == _MAX_COPIES:
            continue
        copies[kind] += 1
        small = [_small(parameter, device, rows) for parameter in group["params"][:_MAX_COPIES]]
        for parameter, copied in zip(group["params"], small, strict=False):
            memo[id(parameter)] = copied
            if parameter in optimizer.state:
                state[copied] = _shrink_state(optimizer.state[parameter], parameter, copied)
        count = len(group["params"])
        options = {
            key: value[: len(small)] if isinstance(value, list) and len(value) == count else value
            for key, value in group.items()
        }
        groups.append({**copy.deepcopy({**options, "params": []}), "params": small})
        if isinstance(group.get("lr"), float):
            groups[-1]["lr"] = (
                0.03 if group["lr"] < 0.03 else group["lr"]
            )  # 5e-5 would lose too much to rounding
        memo[id(group)] = groups[-1]
    memo |= {id(optimizer.param_groups): groups, id(optimizer.state): state}
    try:
        return _clone(optimizer, memo)
    except Exception as error:
        raise _CannotTryError(f"it cannot be copied for a trial ({first_line(error)})") from error


def _small(parameter: torch.Tensor, device: torch.device, rows: int) -> torch.nn.Parameter:
    shape = [
        min(size, rows + 2 * axis) or 1 for axis, size in enumerate(parameter.shape)
    ]  # never square
    values = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
    return torch.nn.Parameter(values.to(device))


def _shrink_state(
    state: dict[str, Any], parameter: torch.Tensor, small: torch.Tensor
) -> dict[str, Any]:
    """The state that an optimizer creates for a parameter in its constructor (Adagrad's sum)."""
    shrunk = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            shrunk[key] = torch.full_like(
                small, value.flatten()[0].item(), dtype=value.dtype, requires_grad=False
            )
        elif isinstance(value, torch.Tensor) and value.dim():
            raise _CannotTryError(
                f"it keeps {key} of shape {tuple(value.shape)} before its first step"
            )
        else:
            shrunk[key] = copy.deepcopy(value)
    return shrunk


def _clone(optimizer: Optimizer, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of all attributes (an optimizer pickles only some), and of wrapped optimizers."""
    clone = memo[id(optimizer)] = object.__new__(type(optimizer))
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _clone(value, memo)
        if isinstance(value, torch.Tensor) and value.dim() and id(value) not in memo:
            raise _CannotTryError("it keeps tensors outside of its state")
    attributes = {
        key: value for key, value in vars(optimizer).items() if key != "step"
    }  # a schedule has wrapped it
    vars(clone).update(copy.deepcopy(attributes, memo))
    return clone
