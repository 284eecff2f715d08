"""Restores a checkpoint into a prepared model and optimizer, whatever strategy and world size saved it.

Each rank reads only its own elements, block by block: it needs memory for one block. What cannot be
restored raises before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from toolkit.checkpoint.live import TORCH_DTYPES, Fragment, LiveState, full_shape, persistent_buffers, tied_names
from toolkit.checkpoint.tensor_index import CheckpointReader, Scalar, TensorIndex
from toolkit.errors import Faults, UserError, listing

_BLOCK = 4 << 20  # elements: 16 MiB of fp32
# DeepSpeed's implementations of an optimizer, with the same state; but their `step` is a number, and torch's a tensor.
_EQUIVALENT = {"DeepSpeedCPUAdam": "AdamW", "FusedAdam": "AdamW"}


def restore(state: LiveState, reader: CheckpointReader, steps: int) -> None:
    """Restores weights, buffers and optimizer state; all ranks must call it. `steps`: taken so far.

    Raises UserError, before anything is changed, when the checkpoint does not fit the model or the optimizer.
    """
    # by the model's first names of tied parameters
    first: dict[str, str] = {}
    for name, _ in state.module.named_parameters():
        if (other := first.setdefault(reader.tied.get(name, name), name)) != name:
            raise _tie_error(reader, "one weight", other, name)
    for name, other in tied_names(state.module).items():
        if {name, other} <= reader.weights.keys() - reader.tied.keys():
            raise _tie_error(reader, "two weights", other, name)
    reader = reader.renamed({name: first.get(name, name) for name in reader.names()})
    _check_model(state, reader)
    _check_optimizer(state, reader)
    state.before_loading()
    with torch.no_grad():
        _make_optimizer_state(state, reader)
        _load_groups(state, reader)
        for fragment in state.fragments():
            _restore_fragment(fragment, reader)
    state.after_loading(steps)


def _tie_error(reader: CheckpointReader, has: str, one: str, other: str) -> UserError:
    remedy = "tie them as the model that saved it did (tie_word_embeddings), or pass another --output_dir"
    return UserError(f"{reader.path} has {has} for {one} and {other}, unlike this model: {remedy}")


def _restore_fragment(fragment: Fragment, reader: CheckpointReader) -> None:
    tensor = reader.weights.get(fragment.name)
    if tensor is None:
        return  # excluded from the checkpoint: it has the base model's values
    copy_elements(fragment.values, tensor, fragment.start)
    state = reader.optimizer_state.get(fragment.name, {})
    for key, values in fragment.state.elements.items():
        copy_elements(values, state[key], fragment.start)
    for key, values in fragment.state.factors.items():
        copy_elements(values.view(-1), state[key], 0)


def copy_elements(target: torch.Tensor, tensor: TensorIndex, start: int) -> None:
    """Copies elements [start, start + n) of a saved tensor into a (n,) tensor, block by block."""
    for first in range(0, target.numel(), _BLOCK):
        count = min(_BLOCK, target.numel() - first)
        block = torch.frombuffer(tensor.read(start + first, count), dtype=TORCH_DTYPES[tensor.dtype])
        target.narrow(0, first, count).copy_(block)


def _check_model(state: LiveState, reader: CheckpointReader) -> None:
    tensors = [*state.module.named_parameters(), *persistent_buffers(state.module)]
    expected = {name: (full_shape(tensor), tensor.requires_grad) for name, tensor in tensors}
    names = {*expected, *(name for name, _ in state.module.named_parameters(remove_duplicate=False)), *reader.buffers}
    faults = Faults()
    if missing := [name for name in expected if name not in reader.weights and name not in reader.excluded]:
        faults.add(f"{reader.path} lacks {listing(missing, 4)}, which the model has")
    if surplus := [name for name in reader.weights if name not in names]:
        faults.add(f"{reader.path} has {listing(surplus, 4)}, which the model lacks")
    for name, (shape, trained) in expected.items():
        tensor = reader.weights.get(name)
        if tensor is not None and tensor.shape != shape:
            faults.add(f"{reader.path}: {name} has shape {list(tensor.shape)}, and {list(shape)} in the model")
        elif trained and math.prod(shape) > 0 and name in reader.frozen:
            faults.add(f"{reader.path} has no optimizer state for {name}, which was frozen and is trained now")
    faults[4:] = [f"and {len(faults) - 4} more such differences"] if len(faults) > 4 else []
    faults.raise_if_any()


def _check_optimizer(state: LiveState, reader: CheckpointReader) -> None:
    saved, current = str(reader.optimizer.get("class", "")), type(state.optimizer).__name__
    if saved and _EQUIVALENT.get(saved, saved) != _EQUIVALENT.get(current, current):
        raise UserError(
            f"{reader.path} was saved by {saved}, and this run has {current}: use the same again, or "
            "another --output_dir"
        )
    if (reader.strategy, reader.world) != (state.strategy, state.world):
        _check_strategy_dependent_state(state, reader)
    groups = _optimizer_facts(state, reader).get("groups", [])
    keys = ", ".join(dict.fromkeys(key for group in groups for key in group if key != "lr"))  # the schedule sets lr
    if keys and len(groups) != len(state.optimizer.param_groups):
        raise UserError(
            f"{reader.path}: {current} had {len(groups)} parameter groups, in which it changed {keys}, and has "
            f"{len(state.optimizer.param_groups)} in this run: use the same again, or another --output_dir"
        )
    if state.file_format == "deepspeed":
        for _, names in state.optimizer_tensors():
            _check_equal_steps(reader, names)


def _check_strategy_dependent_state(state: LiveState, reader: CheckpointReader) -> None:
    """Raises UserError for state of a parameter's rows or columns, which ZeRO and FSDP2 shard, and for values that
    differ by rank."""
    fixed = []
    if not (state.file_format == "whole" and reader.strategy in ("single", "ddp")):
        for name, tensors in reader.optimizer_state.items():
            factors = [key for key, tensor in tensors.items() if tensor.shape != reader.weights[name].shape]
            fixed += [f"{', '.join(sorted(factors))} of the unsharded {name}"] if factors else []
    for name, scalars in reader.optimizer_scalars.items():
        keys = [key for key, scalar in scalars.items() if isinstance(scalar.value, tuple)]
        fixed += [f"another {key} of {name} on each rank" for key in keys]
    for table in reader.optimizer.get("ranks", [])[:1]:
        keys = [key for group in table["groups"] for key in group] + list(table["state"])
        fixed += [f"another {key} on each rank" for key in keys]
    if fixed:
        raise UserError(
            f"{reader.path}: {type(state.optimizer).__name__} has {fixed[0]}, which {state.strategy} on {state.world} "
            f"cannot restore: resume under {reader.strategy} with {reader.world} processes or change --output_dir"
        )


def _check_equal_steps(reader: CheckpointReader, names: list[str]) -> None:
    """Raises UserError unless these parameters, which share a flat master, have the same steps and state keys."""
    first: tuple[str, dict[str, Any]] | None = None
    for name in names:
        if name not in reader.weights or not reader.weights[name].count:
            continue
        values: dict[str, Any] = dict.fromkeys(reader.optimizer_state.get(name, {}), "a tensor")
        values |= {key: scalar.value for key, scalar in reader.optimizer_scalars.get(name, {}).items()}
        other, expected = first = first or (name, values)
        for key in {**expected, **values}:
            if (one := expected.get(key, "none")) != (two := values.get(key, "none")):
                fault = f"{other} and {name} differ in {key} ({one} and {two}), and ZeRO has one for both"
                raise UserError(f"{reader.path}: {fault}: resume with one process or DDP")


def _optimizer_facts(state: LiveState, reader: CheckpointReader) -> Mapping[str, Any]:
    """This rank's entry of `save.optimizer_facts`."""
    ranks = reader.optimizer.get("ranks")
    return ranks[state.rank] if ranks else reader.optimizer


def _make_optimizer_state(state: LiveState, reader: CheckpointReader) -> None:
    """Makes the tensors that `_restore_fragment` fills, drops state that the checkpoint lacks, and restores scalars."""
    for parameter, names in state.optimizer_tensors():
        current = state.optimizer.state.pop(parameter, {})
        restored: dict[str, Any] = {}
        for name in names:
            for key, tensor in reader.optimizer_state.get(name, {}).items():
                existing = restored.get(key, current.get(key))
                restored[key] = _state_tensor(existing, parameter, reader.weights[name], tensor)
            for key, scalar in reader.optimizer_scalars.get(name, {}).items():
                if key == "step" and reader.optimizer.get("class") in _EQUIVALENT:
                    scalar = Scalar(float(scalar.value), "F32")
                existing = restored.get(key, current.get(key))
                restored[key] = _state_scalar(existing, key, scalar, parameter, state)
        if restored:
            state.optimizer.state[parameter] = restored


def _state_tensor(existing: Any, parameter: torch.Tensor, weight: TensorIndex, tensor: TensorIndex) -> torch.Tensor:
    """The existing tensor if it fits, since others may refer to it, or zeros. State saved in the weight's dtype
    gets the parameter's."""
    dtype = parameter.dtype if tensor.dtype == weight.dtype else TORCH_DTYPES[tensor.dtype]
    elementwise = tensor.shape == weight.shape
    shape = parameter.shape if elementwise else tensor.shape
    if isinstance(existing, torch.Tensor) and existing.shape == shape and existing.dtype == dtype:
        return existing
    if elementwise:
        return torch.zeros_like(parameter.data, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _state_scalar(existing: Any, key: str, scalar: Scalar, parameter: torch.Tensor, state: LiveState) -> Any:
    """The saved value, in the existing tensor if there is one."""
    value = scalar.value[state.rank] if isinstance(scalar.value, tuple) else scalar.value
    if key == "step" and type(state.optimizer).__name__ in _EQUIVALENT:
        return int(value)
    if isinstance(existing, torch.Tensor) and existing.numel() == 1 and value is not None:
        return existing.fill_(value)
    if not scalar.dtype:
        return value
    # as PyTorch does: fused kernels read the step on the parameter's device
    on_device = key != "step" or any(g.get("fused") or g.get("capturable") for g in state.optimizer.param_groups)
    return torch.tensor(value, dtype=TORCH_DTYPES[scalar.dtype], device=parameter.device if on_device else "cpu")


def _load_groups(state: LiveState, reader: CheckpointReader) -> None:
    """Restores the hyperparameters that the optimizer had changed, and its state that belongs to no parameter."""
    facts = _optimizer_facts(state, reader)
    targets = [*zip(state.optimizer.param_groups, facts.get("groups", []), strict=False)]
    for target, values in [*targets, (state.optimizer.state, facts.get("state", {}))]:
        for key, saved in values.items():
            existing, value = target.get(key), _from_json(saved, next(state.module.parameters()).device)
            if isinstance(existing, torch.Tensor):
                existing.copy_(torch.as_tensor(value, dtype=existing.dtype))
            else:
                target[key] = tuple(value) if isinstance(existing, tuple) else value


def _from_json(value: Any, device: torch.device) -> Any:
    """A copy of a value, with tensors for the tables of `group_json`; `device`: of those that were not on a CPU."""
    if isinstance(value, list):
        return [_from_json(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "device", "values"}:
        place = value["device"] if value["device"] == "cpu" else device
        return torch.tensor(value["values"], dtype=TORCH_DTYPES[value["dtype"]], device=place)
    return {key: _from_json(item, device) for key, item in value.items()}
