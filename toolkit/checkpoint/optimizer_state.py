"""The state of an optimizer of any class: of its parameters, and in its parameter groups."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from toolkit.utils.files import as_json

# By safetensors' names, as in `TensorIndex.dtype`.
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_JSON_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class State:
    """An optimizer's state of one tensor, by the optimizer's keys (`exp_avg`, `step`)."""

    elements: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the same shape."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of another shape, such as Adafactor's rows and columns (Shazeer and Stern, 2018)."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """0-dimensional tensors, numbers, bools, strings, None."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """Anything else: it cannot be saved."""


def split_state(optimizer: Any, tensor: torch.Tensor) -> State:
    """An optimizer's state of a tensor, by kind; empty before the first step."""
    state = State()
    for key, value in optimizer.state.get(tensor, {}).items():
        if not isinstance(key, str) or "." in key:
            state.unknown[str(key)] = value
        elif not isinstance(value, torch.Tensor):
            (state.scalars if isinstance(value, _JSON_SCALARS) else state.unknown)[key] = value
        elif value.dtype not in DTYPE_NAMES:
            state.unknown[key] = value
        elif value.shape == tensor.shape and (value.dim() or key != "step"):
            state.elements[key] = value
        else:
            (state.factors if value.dim() else state.scalars)[key] = value
    return state


# Not an attribute of the optimizer: torch would pickle it, and DeepSpeed and accelerate wrap the optimizer.
_INITIAL_GROUPS: WeakKeyDictionary[Any, list[dict[str, Any]]] = WeakKeyDictionary()


def remember_groups(optimizer: Any) -> None:
    """Remembers the current hyperparameters of an optimizer and those it wraps, for `changed_hyperparameters`."""
    while optimizer is not None:
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in _INITIAL_GROUPS:
            defaults = optimizer.defaults if optimizer.state else {}  # its groups may have changed already
            _INITIAL_GROUPS[optimizer] = [_hyperparameters({**group, **defaults}) for group in optimizer.param_groups]
        optimizer = getattr(optimizer, "optimizer", None)


def changed_hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Of each parameter group the hyperparameters that the optimizer has changed since `remember_groups`."""
    pairs: Any = itertools.zip_longest(optimizer.param_groups, _INITIAL_GROUPS.get(optimizer, []), fillvalue={})
    return [
        {key: value for key, value in _hyperparameters(group).items() if key not in initial or value != initial[key]}
        for group, initial in pairs
    ]


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: as_json(value) for key, value in group.items() if key not in ("params", "initial_lr")}


def is_json(value: Any) -> bool:
    """Whether JSON can hold the value and give it back."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    return all(map(is_json, value)) if isinstance(value, list) else isinstance(value, _JSON_SCALARS)
