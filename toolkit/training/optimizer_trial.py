"""Whether an optimizer can be used in the loop, and computes the same from shards of parameters: a trial decides.

ZeRO lays the parameters of a group end to end, cuts that anywhere and gives each process a piece, and steps one group
after the other. FSDP2 cuts each parameter by rows. What updates weight by weight sees no difference. What uses a
parameter's rows, columns, norm or number of dimensions, at all parameters together, or counts its calls, becomes
another optimizer without an error. So it takes a few steps on small parameters, whole and in pieces.
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

# (the most rows of a small parameter, steps). RAdam changes its update at the 6th step, a Lookahead at the 5th or 6th,
# SOAP and AdaShift at the 11th. Adafactor's kin keep rows and columns from 128 on; of a piece so long Shampoo would
# keep a matrix of gigabytes, but the first trial has refused it
_TRIALS = ((12, 12), (130, 3))
_MOST = 2  # parameters of a group, and groups that differ in nothing but their learning rate
_TOLERANCE = 1e-4  # of an update's norm: what fp32 rounds away is a hundredth of that

Cut = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class _CannotTryError(Exception):
    """Its state belongs to the real parameters."""


def use_fault(optimizer: Optimizer, device: torch.device) -> str:
    """Why it cannot take a step as the loop asks for it: it wants a closure, say, or sparse gradients. Empty where it
    can, or where no copy of it can be made."""
    with _seeded(device), contextlib.suppress(_CannotTryError):
        rows, steps = _TRIALS[0]
        trial = _copy_of(optimizer, device, rows)
        try:
            for number in range(steps):
                _set_gradients(trial, number)
                trial.step()
        except Exception as error:
            return first_line(error)
    return ""


def pieces_fault(optimizer: Optimizer, device: torch.device, stage: int) -> str:
    """Why the updates of pieces, as two processes have them, are not those of whole parameters; empty where they are.

    `stage`: of ZeRO; 0 for FSDP2.
    """
    try:
        for rows, steps in _TRIALS:
            with _seeded(device):
                if number := _first_difference(optimizer, device, stage, rows, steps):
                    return f"its step {number} was another one in a trial"
    except _CannotTryError as error:
        return str(error)
    except Exception as error:
        return f"a trial ended with {type(error).__name__}: {first_line(error)}"
    return ""


def _first_difference(optimizer: Optimizer, device: torch.device, stage: int, rows: int, steps: int) -> int:
    """The number of the first step that is another one with pieces; 0 where all are alike."""
    whole = _copy_of(optimizer, device, rows)
    before = [[each.detach().clone() for each in group["params"]] for group in whole.param_groups]
    trials = [(_copy_of(optimizer, device, rows), cut) for cut in _cuts(device, stage)]
    for trial, cut in trials:
        for group in trial.param_groups:
            group["params"] = [piece.requires_grad_() for piece in cut(group["params"])]
    for number in range(steps):
        _set_gradients(whole, number)
        for trial, cut in trials:
            for group, source in zip(trial.param_groups, whole.param_groups, strict=True):
                gradients = cut([each.grad for each in source["params"]])
                for piece, gradient in zip(group["params"], gradients, strict=True):
                    piece.grad = gradient
            _step(trial, stage)
        whole.step()
        if any(_differs(trial, whole, before, cut) for trial, cut in trials):
            return number + 1
    return 0


def _cuts(device: torch.device, stage: int) -> list[Cut]:
    """What each of two processes gets; for FSDP2 also what this one gets: not every operation takes a DTensor."""
    cuts: list[Cut] = [partial(_flat if stage else _rows, rank=rank) for rank in range(2)]
    if stage or not torch.distributed.is_initialized():
        return cuts
    mesh = DeviceMesh(device.type, list(range(torch.distributed.get_world_size())))
    return [*cuts, partial(_shards, mesh=mesh)]


@contextlib.contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
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


def _shards(tensors: list[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    return [distribute_tensor(each.detach().clone(), mesh, [Shard(0)], src_data_rank=None) for each in tensors]


def _step(optimizer: Optimizer, stage: int) -> None:
    """As DeepSpeed steps: stages 1 and 2 show one group at a time, stage 3 all, of which one has parameters."""
    groups, pieces = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    for place in range(len(groups) if stage else 1):
        for other, group in enumerate(groups):
            group["params"] = pieces[other] if other == place or stage < 3 else []
        optimizer.param_groups = [groups[place]] if stage in (1, 2) else groups
        optimizer.step()
    optimizer.param_groups = groups
    for group, params in zip(groups, pieces, strict=True):
        group["params"] = params


def _set_gradients(optimizer: Optimizer, number: int) -> None:
    """Of step `number`: rows unlike in size; every other time at right angles to the weights, as those before a norm
    are (AdamP tests for that); far smaller and far larger ones, for what clips."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            rows = weight.detach().reshape(len(weight) if weight.dim() > 1 else 1, -1)
            gradient = torch.randn(rows.shape).to(rows) * torch.linspace(0.5, 2, len(rows)).to(rows)[:, None]
            if number % 2:
                squares = (rows * rows).sum(1, keepdim=True).clamp(min=1e-12)
                gradient -= rows * (gradient * rows).sum(1, keepdim=True) / squares
            weight.grad = gradient.reshape(weight.shape) * (0.1, 0.1, 1e-3, 10.0)[number % 4]


def _differs(trial: Optimizer, whole: Optimizer, before: list[list[torch.Tensor]], cut: Cut) -> bool:
    for group, source, start in zip(trial.param_groups, whole.param_groups, before, strict=True):
        for tensors in zip(group["params"], cut(source["params"]), cut(start), strict=True):
            piece, expected, first = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
            rounded = 1e-6 * expected.norm()
            if not (piece.detach() - expected).norm() <= _TOLERANCE * (expected - first).norm() + rounded:
                return True
        # a step size that it estimates itself may still be too small to show (D-Adaptation, Prodigy)
        if any(not math.isclose(_number(group.get(key)), _number(source[key]), rel_tol=_TOLERANCE) for key in source):
            return True
    return False


def _number(value: Any) -> float:
    single = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
    return float(value) if single or isinstance(value, float) else 0.0


def _copy_of(optimizer: Optimizer, device: torch.device, rows: int) -> Any:
    """The optimizer as it is, but for its parameters: a few small ones of the same kinds. Raises _CannotTryError."""
    if hasattr(optimizer, "__del__"):  # a copy's end would be the end of what it holds
        raise _CannotTryError("it owns resources outside of Python, and cannot be copied for a trial")
    memo: dict[int, Any] = {id(each): torch.empty(0) for group in optimizer.param_groups for each in group["params"]}
    state: dict[Any, Any] = defaultdict(dict)
    groups, alike = [], Counter[str]()
    for group in optimizer.param_groups:
        kind = repr([(key, value) for key, value in group.items() if key not in ("params", "lr", "initial_lr")])
        if not group["params"] or alike[kind] == _MOST:
            continue
        alike[kind] += 1
        small = [_small(parameter, device, rows) for parameter in group["params"][:_MOST]]
        for parameter, copied in zip(group["params"], small, strict=False):
            memo[id(parameter)] = copied
            if parameter in optimizer.state:
                state[copied] = _shrunk(optimizer.state[parameter], parameter, copied)
        count = len(group["params"])
        options = {
            key: value[: len(small)] if _is_per_parameter(value, count) else value for key, value in group.items()
        }
        groups.append({**copy.deepcopy({**options, "params": []}), "params": small})
        if isinstance(group.get("lr"), float):
            groups[-1]["lr"] = 0.03 if group["lr"] < 0.03 else group["lr"]  # of 5e-5 fp32 would round much away
        memo[id(group)] = groups[-1]
    memo |= {id(optimizer.param_groups): groups, id(optimizer.state): state}
    try:
        return _clone(optimizer, memo)
    except Exception as error:
        raise _CannotTryError(f"it cannot be copied for a trial ({first_line(error)})") from error


def _small(parameter: torch.Tensor, device: torch.device, rows: int) -> torch.nn.Parameter:
    shape = [min(size, rows + 2 * axis) or 1 for axis, size in enumerate(parameter.shape)]  # a square is none
    values = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
    return torch.nn.Parameter(values.to(device))


def _shrunk(state: dict[str, Any], parameter: torch.Tensor, small: torch.Tensor) -> dict[str, Any]:
    """The state that an optimizer creates of a parameter at construction, as Adagrad its sum."""
    shrunk = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            shrunk[key] = torch.full_like(small, value.flatten()[0].item(), dtype=value.dtype, requires_grad=False)
        elif isinstance(value, torch.Tensor) and value.dim():
            raise _CannotTryError(f"it keeps {key} of shape {tuple(value.shape)} before its first step")
        else:
            shrunk[key] = copy.deepcopy(value)
    return shrunk


def _is_per_parameter(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def _clone(optimizer: Optimizer, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy`, with the attributes that an optimizer leaves out of its state; wrapped ones too."""
    clone = memo[id(optimizer)] = object.__new__(type(optimizer))
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _clone(value, memo)
        if isinstance(value, torch.Tensor) and value.dim() and id(value) not in memo:
            raise _CannotTryError("it keeps tensors beside its state")
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}  # which a schedule wraps
    vars(clone).update(copy.deepcopy(attributes, memo))
    return clone
