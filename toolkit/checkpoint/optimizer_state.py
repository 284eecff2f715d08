"""The state of an optimizer of any class: per element of its parameters, in other shapes, and in its groups."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from toolkit.utils.files import as_json

# By the names safetensors uses, as in `TensorIndex.dtype`.
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class State:
    """An optimizer's state of one tensor, by its own keys."""

    elements: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the tensor's shape."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of another shape, such as the rows and columns of Adafactor (Shazeer and Stern, 2018)."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Tensors without dimensions, numbers, bools, texts, None."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """Anything else, which no checkpoint holds."""


def state_of(optimizer: Any, tensor: torch.Tensor) -> State:
    """Empty where the tensor has taken no step."""
    state = State()
    for key, value in optimizer.state.get(tensor, {}).items():
        if not isinstance(key, str) or "." in key:
            state.unknown[str(key)] = value
        elif not isinstance(value, torch.Tensor):
            (state.scalars if isinstance(value, _PLAIN) else state.unknown)[key] = value
        elif value.dtype not in DTYPE_NAMES:
            state.unknown[key] = value
        elif value.shape == tensor.shape and (value.dim() or key != "step"):
            state.elements[key] = value
        else:
            (state.factors if value.dim() else state.scalars)[key] = value
    return state


# Not an attribute of the optimizer, which torch would pickle, and DeepSpeed and accelerate wrap. Read for saving alone.
_FIRST_GROUPS: WeakKeyDictionary[Any, list[dict[str, Any]]] = WeakKeyDictionary()


def remember_groups(optimizer: Any) -> None:
    """Remembers the hyperparameters that an optimizer, and what it wraps, begin with: what `changed_groups` compares
    with."""
    while optimizer is not None:
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in _FIRST_GROUPS:
            stepped = optimizer.defaults if optimizer.state else {}
            _FIRST_GROUPS[optimizer] = [_hyperparameters({**group, **stepped}) for group in optimizer.param_groups]
        optimizer = getattr(optimizer, "optimizer", None)


def changed_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Of each parameter group the hyperparameters that are not those it began with."""
    pairs: Any = itertools.zip_longest(optimizer.param_groups, _FIRST_GROUPS.get(optimizer, []), fillvalue={})
    return [
        {key: value for key, value in _hyperparameters(group).items() if key not in first or value != first[key]}
        for group, first in pairs
    ]


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: as_json(value) for key, value in group.items() if key not in ("params", "initial_lr")}


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return all(map(is_plain, value)) if isinstance(value, list) else isinstance(value, _PLAIN)
