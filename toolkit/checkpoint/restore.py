"""A saved state into the live one, whatever strategy and number of processes saved it.

Each process reads the elements it owns, block by block: nobody holds more of the optimizer's state than its own shard
and one block. What cannot be restored is refused before anything is changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch

from toolkit.checkpoint.live import Fragment, LiveState, persistent_buffers, whole_shape
from toolkit.checkpoint.optimizer_state import TORCH_DTYPES
from toolkit.checkpoint.tensor_index import CheckpointReader, Scalar, TensorIndex
from toolkit.errors import Faults, UserError, listing

_BLOCK = 4 << 20  # elements: 16 MiB of fp32
# They keep the same state for the same algorithm.
_SAME_AS = {"DeepSpeedCPUAdam": "AdamW", "FusedAdam": "AdamW"}
_OTHER_RUN = "use the same {} again, or change --output_dir"


def restore(state: LiveState, reader: CheckpointReader, steps: int) -> None:
    """Fills weights, the optimizer's state and buffers. All processes call this.

    Raises UserError, before anything is changed, when the checkpoint is not of this model, or of an optimizer
    whose state cannot be restored here.
    """
    _refuse_other_model(state, reader)
    _refuse_other_optimizer(state, reader)
    state.before_loading()
    with torch.no_grad():
        _make_optimizer_state(state, reader)
        _load_groups(state, reader)
        for fragment in state.fragments():
            _fill_fragment(fragment, reader)
    state.after_loading(steps)


def _fill_fragment(fragment: Fragment, reader: CheckpointReader) -> None:
    tensor = _tensor(reader, fragment.name)
    if tensor is None:
        return  # left out on purpose: it has the base model's values
    fill(fragment.values, tensor, fragment.start)
    state = reader.optimizer_state.get(_saved_name(reader, fragment.name), {})
    for key, values in fragment.state.items():
        fill(values, state[key], fragment.start)
    for key, values in fragment.factors.items():
        fill(values.view(-1), state[key], 0)


def fill(target: torch.Tensor, tensor: TensorIndex, start: int) -> None:
    """Copies elements [start, start + n) of a saved tensor into a (n,) tensor, block by block."""
    for first in range(0, target.numel(), _BLOCK):
        count = min(_BLOCK, target.numel() - first)
        block = torch.frombuffer(tensor.read(start + first, count), dtype=TORCH_DTYPES[tensor.dtype])
        target.narrow(0, first, count).copy_(block)


def _saved_name(reader: CheckpointReader, name: str) -> str:
    return reader.tied.get(name, name)


def _tensor(reader: CheckpointReader, name: str) -> TensorIndex | None:
    name = _saved_name(reader, name)
    return reader.weights.get(name) or reader.buffers.get(name)


def _saved_names(reader: CheckpointReader, names: list[str]) -> list[str]:
    """The names in the checkpoint of those parameters that are there."""
    return [name for name in (_saved_name(reader, name) for name in names) if name in reader.weights]


# what is refused


def _refuse_other_model(state: LiveState, reader: CheckpointReader) -> None:
    tensors = [*state.module.named_parameters(), *persistent_buffers(state.module)]
    expected = {name: (whole_shape(tensor), tensor.requires_grad) for name, tensor in tensors}
    names = {*expected, *(name for name, _ in state.module.named_parameters(remove_duplicate=False))}
    faults = Faults()
    missing = [name for name in expected if _tensor(reader, name) is None and name not in reader.excluded]
    if missing:
        faults.add(f"{reader.path} lacks {listing(missing, 4)}, which the model has")
    if surplus := [name for name in reader.weights if name not in names]:
        faults.add(f"{reader.path} holds {listing(surplus, 4)}, which the model has not")
    for name, (shape, trained) in expected.items():
        tensor = _tensor(reader, name)
        if tensor is not None and tensor.shape != shape:
            faults.add(f"{reader.path}: {name} has shape {list(tensor.shape)}, and {list(shape)} in the model")
        elif trained and math.prod(shape) > 0 and _saved_name(reader, name) in reader.frozen:
            faults.add(f"{reader.path} has no optimizer state for {name}, which is trained here and was not there")
    if len(faults.faults) > 4:
        faults.faults[4:] = [f"and {len(faults.faults) - 4} more of the kind"]
    faults.raise_if_any()


def _refuse_other_optimizer(state: LiveState, reader: CheckpointReader) -> None:
    saved, now = str(reader.optimizer.get("class", "")), type(state.optimizer).__name__
    if saved and _SAME_AS.get(saved, saved) != _SAME_AS.get(now, now):
        raise UserError(f"{reader.path} was saved by {saved}, and this run has {now}: {_OTHER_RUN.format('optimizer')}")
    if (reader.strategy, reader.world) != (state.strategy, state.world):
        _refuse_strategy_dependent(state, reader)
    groups = _optimizer_facts(reader).get("groups", [])
    keys = ", ".join(dict.fromkeys(key for group in groups for key in group if key != "lr"))  # the schedule sets that
    if keys and len(groups) != len(state.optimizer.param_groups):
        raise UserError(
            f"{reader.path}: {now} had {len(groups)} groups of parameters, in which it changed {keys}, and has "
            f"{len(state.optimizer.param_groups)} in this run: {_OTHER_RUN.format('groups')}"
        )
    if state.strategy_files == "deepspeed":
        for _, names in state.holders():
            _refuse_uneven(reader, names)


def _refuse_strategy_dependent(state: LiveState, reader: CheckpointReader) -> None:
    """Rows and columns of a parameter, which ZeRO flattens and FSDP2 shards, and values that differ by process."""
    parts = []
    if not (state.strategy_files == "whole" and reader.strategy in ("single", "ddp")):
        for name, tensors in reader.optimizer_state.items():
            factors = [key for key, tensor in tensors.items() if tensor.shape != reader.weights[name].shape]
            parts += [f"{', '.join(sorted(factors))} of {name} as a whole"] if factors else []
    for name, scalars in reader.optimizer_scalars.items():
        keys = [key for key, scalar in scalars.items() if isinstance(scalar.value, tuple)]
        parts += [f"another {key} of {name} in each process" for key in keys]
    for table in reader.optimizer.get("ranks", [])[:1]:
        keys = [key for group in table["groups"] for key in group] + list(table["state"])
        parts += [f"another {key} in each process" for key in keys]
    if parts:
        raise UserError(
            f"{reader.path}: {type(state.optimizer).__name__} has {parts[0]}, which {state.strategy} on {state.world} "
            f"cannot restore: resume under {reader.strategy} with {reader.world} processes, or change --output_dir"
        )


def _refuse_uneven(reader: CheckpointReader, names: list[str]) -> None:
    """Parameters that are flattened together share one count of steps, and the keys of their state."""
    first: tuple[str, dict[str, str]] | None = None
    for name in _saved_names(reader, names):
        if not reader.weights[name].count:
            continue
        values = dict.fromkeys(reader.optimizer_state.get(name, {}), "one")
        for key, scalar in reader.optimizer_scalars.get(name, {}).items():
            values[key] = f"{scalar.value:g}" if isinstance(scalar.value, float) else str(scalar.value)
        other, expected = first = first or (name, values)
        for key in {**expected, **values}:
            if expected.get(key) != values.get(key):
                what = "taken the same number of steps" if key == "step" else f"the same {key}"
                raise UserError(
                    f"{reader.path}: not all parameters have {what} ({other} {expected.get(key, 'none')} and {name} "
                    f"{values.get(key, 'none')}): only one process or data parallel can resume from that"
                )


# the optimizer's state


def _optimizer_facts(reader: CheckpointReader) -> Mapping[str, Any]:
    """What the optimizer of this process had changed in its groups, and its state of no parameter."""
    ranks = reader.optimizer.get("ranks")
    return ranks[_rank()] if ranks else reader.optimizer


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _make_optimizer_state(state: LiveState, reader: CheckpointReader) -> None:
    """Gives the optimizer a tensor for all that the checkpoint has of each parameter, removes what it has not, and
    sets the values that all elements share."""
    for holder, names in state.holders():
        now = state.optimizer.state.pop(holder, {})
        restored: dict[str, Any] = {}
        for name in _saved_names(reader, names):
            for key, tensor in reader.optimizer_state.get(name, {}).items():
                restored[key] = _tensor_for(restored.get(key, now.get(key)), holder, reader.weights[name], tensor)
            for key, scalar in reader.optimizer_scalars.get(name, {}).items():
                restored[key] = _scalar_for(restored.get(key, now.get(key)), key, scalar, holder, state.optimizer)
        if restored:
            state.optimizer.state[holder] = restored


def _tensor_for(now: Any, holder: torch.Tensor, weight: TensorIndex, tensor: TensorIndex) -> torch.Tensor:
    """The tensor there is, where others may refer to it, or one of zeros. Its type is the holder's where it was that
    of the weight."""
    dtype = holder.dtype if tensor.dtype == weight.dtype else TORCH_DTYPES[tensor.dtype]
    elementwise = tensor.shape == weight.shape
    shape = holder.shape if elementwise else tensor.shape
    if isinstance(now, torch.Tensor) and now.shape == shape and now.dtype == dtype:
        return now
    if elementwise:
        return torch.zeros_like(holder.data, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=holder.device)


def _scalar_for(now: Any, key: str, scalar: Scalar, holder: torch.Tensor, optimizer: Any) -> Any:
    """A number as it was saved, in the tensor that is there for it."""
    value = scalar.value[_rank()] if isinstance(scalar.value, tuple) else scalar.value
    if isinstance(now, torch.Tensor) and now.numel() == 1 and value is not None:
        return now.fill_(value)
    if not scalar.dtype:
        return value
    # PyTorch's own choice: fused kernels read the count where the parameter lies
    on_device = key != "step" or any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
    return torch.tensor(value, dtype=TORCH_DTYPES[scalar.dtype], device=holder.device if on_device else "cpu")


def _load_groups(state: LiveState, reader: CheckpointReader) -> None:
    """What the optimizer had changed itself in its groups, and its state of no parameter."""
    facts = _optimizer_facts(reader)
    targets = [*zip(state.optimizer.param_groups, facts.get("groups", []), strict=False)]
    for target, values in [*targets, (state.optimizer.state, facts.get("state", {}))]:
        for key, value in values.items():
            now = target.get(key)
            if isinstance(now, torch.Tensor):
                now.copy_(torch.tensor(value, dtype=now.dtype))
            else:
                target[key] = tuple(value) if isinstance(now, tuple) else copy.deepcopy(value)
