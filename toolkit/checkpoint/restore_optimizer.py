"""An optimizer's state from a checkpoint: what cannot be carried over is refused, the rest is made and set."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

import torch

from toolkit.checkpoint.live import LiveState
from toolkit.checkpoint.optimizer_state import TORCH_DTYPES, kept_of
from toolkit.checkpoint.reader import CheckpointReader, Scalar, TensorIndex
from toolkit.errors import UserError

# They keep the same state for the same algorithm; the toolkit's first checkpoints do not say their class.
_SAME_AS = {"DeepSpeedCPUAdam": "AdamW", "FusedAdam": "AdamW", "": "AdamW"}


def refuse_other_optimizer(state: LiveState, reader: CheckpointReader) -> None:
    """Raises UserError for what the checkpoint has of the optimizer and this run cannot go on from."""
    saved, now = str(reader.optimizer.get("class", "")), type(state.optimizer).__name__
    if _SAME_AS.get(saved, saved) != _SAME_AS.get(now, now) and (saved or now != "Adam"):
        raise UserError(
            f"{reader.path} was saved by {saved or 'AdamW'}, and this run has {now}: take that optimizer again, or "
            "another --output_dir"
        )
    if (reader.strategy, reader.world) != (state.strategy, state.world):
        _refuse_factors(state, reader)
        _refuse_what_ranks_differ_in(state, reader)
    groups = _facts_of(state, reader).get("groups", [])
    keys = ", ".join(dict.fromkeys(key for group in groups for key in group if key != "lr"))  # the schedule sets that
    if keys and len(groups) != len(state.optimizer.param_groups):
        raise UserError(
            f"{reader.path}: {now} had {len(groups)} groups of parameters, in which it changed {keys}, and has "
            f"{len(state.optimizer.param_groups)} in this run: make the same groups, or take another --output_dir"
        )
    if state.strategy_files == "deepspeed":
        for _, names in state.holders():
            _refuse_uneven(reader, names)


def _refuse_factors(state: LiveState, reader: CheckpointReader) -> None:
    """An optimizer that treats a parameter as a matrix sees vectors under ZeRO, and rows under FSDP2."""
    if state.strategy_files == "whole" and reader.strategy in ("single", "ddp"):
        return
    probed: dict[int, list[str]] = {}
    for name in _saved(reader, [name for _, names in state.holders() for name in names]):
        shape = reader.weights[name].shape
        if len(shape) not in probed:
            probed[len(shape)] = _factors_after_a_step(state.optimizer, len(shape))
        stored = [key for key, kept in reader.optimizer_state.get(name, {}).items() if kept.shape != shape]
        if keys := ", ".join(sorted(stored or probed[len(shape)])):
            raise UserError(
                f"{reader.path}: {type(state.optimizer).__name__} keeps {keys} of {name} as a whole, "
                f"which {reader.strategy} on {reader.world} and {state.strategy} on {state.world} processes divide "
                f"otherwise: resume under {reader.strategy} with {reader.world}, or take another --output_dir"
            )


def _factors_after_a_step(optimizer: Any, dimensions: int) -> list[str]:
    """What an optimizer of this class and settings keeps in another shape than that of a parameter with so many
    dimensions: a step of its twin shows it. Empty where the twin takes none."""
    if hasattr(type(optimizer), "__del__"):  # DeepSpeed's, which takes away what both use
        return []
    device = next((tensor.device for tensor in optimizer.state if isinstance(tensor, torch.Tensor)), "cpu")
    probe = torch.nn.Parameter(torch.zeros([*range(2, 2 + dimensions)], device=device))
    probe.grad = torch.zeros_like(probe)
    twin = object.__new__(type(optimizer))  # with neither the hooks nor the scheduler of the first
    own = {key: value for key, value in vars(optimizer).items() if key != "step"}
    hooks: dict[str, Any] = {key: collections.OrderedDict() for key in own if key.endswith("_hooks")}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state: Any = collections.defaultdict(dict)
    try:
        vars(twin).update(own, **hooks, state=state, param_groups=[{**copy.deepcopy(groups[0]), "params": [probe]}])
        type(optimizer).step(twin)
    except Exception:
        return []
    return list(kept_of(twin, probe).factors)


def _refuse_what_ranks_differ_in(state: LiveState, reader: CheckpointReader) -> None:
    found = [
        f"{key} of {name}"
        for name, scalars in reader.optimizer_scalars.items()
        for key, scalar in scalars.items()
        if isinstance(scalar.value, tuple)
    ]
    for table in reader.optimizer.get("ranks", [])[:1]:
        found += [key for group in table["groups"] for key in group] + list(table["state"])
    if found:
        raise UserError(
            f"{reader.path}: each process of {reader.strategy} has its own {found[0]}, which {state.strategy} on "
            f"{state.world} cannot take over: resume under {reader.strategy} with {reader.world} processes, or take "
            "another --output_dir"
        )


def _refuse_uneven(reader: CheckpointReader, names: list[str]) -> None:
    """Flattened parameters share one count of steps: parts of another age cannot be put among them."""
    described = {name: _described(reader, name) for name in _saved(reader, names) if reader.weights[name].count}
    for name, kept in described.items():
        first, alike = next(iter(described.items()))
        for key in {**alike, **kept}:
            if alike.get(key) != kept.get(key):
                what = "taken the same number of steps" if key == "step" else f"the same {key}"
                raise UserError(
                    f"{reader.path}: not all parameters have {what} ({first} {alike.get(key, 'none')} and {name} "
                    f"{kept.get(key, 'none')}): only one process or data parallel can go on from that"
                )


def _described(reader: CheckpointReader, name: str) -> dict[str, str]:
    """What must be equal where parameters are flattened together."""
    scalars = {key: scalar.value for key, scalar in reader.optimizer_scalars.get(name, {}).items()}
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in scalars.items()}
    return {**dict.fromkeys(reader.optimizer_state.get(name, {}), "one"), **texts}


def _facts_of(state: LiveState, reader: CheckpointReader) -> Mapping[str, Any]:
    """What the optimizer of this process had changed in its groups, and kept beside them."""
    ranks = reader.optimizer.get("ranks")
    return ranks[_rank()] if ranks else reader.optimizer


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def make_state(state: LiveState, reader: CheckpointReader) -> None:
    """Gives the optimizer a tensor for all that the checkpoint has of each parameter, takes away what it has not, and
    sets what is kept once for all elements."""
    for holder, names in state.holders():
        saved = _saved(reader, names)
        tensors = {key: (name, kept) for name in saved for key, kept in reader.optimizer_state.get(name, {}).items()}
        scalars = {key: value for name in saved for key, value in reader.optimizer_scalars.get(name, {}).items()}
        own = state.optimizer.state.pop(holder, {})
        made: dict[str, Any] = {}
        for key, (name, stored) in tensors.items():
            made[key] = _tensor_for(own.get(key), holder, reader.weights[name], stored)
        for key, scalar in scalars.items():
            made[key] = _scalar_for(own.get(key), key, scalar, holder, state.optimizer)
        if made:
            state.optimizer.state[holder] = made


def _saved(reader: CheckpointReader, names: list[str]) -> list[str]:
    """Their names in the checkpoint, of those that are there."""
    saved = [reader.tied.get(name, name) for name in names]
    return [name for name in saved if name in reader.weights]


def _tensor_for(now: Any, holder: torch.Tensor, weight: TensorIndex, stored: TensorIndex) -> torch.Tensor:
    """The tensor there is, where others may refer to it, or one of zeros. Its type is the holder's where it was that
    of the weight."""
    dtype = holder.dtype if stored.dtype == weight.dtype else TORCH_DTYPES[stored.dtype]
    whole = stored.shape != weight.shape
    if isinstance(now, torch.Tensor) and now.shape == (stored.shape if whole else holder.shape) and now.dtype == dtype:
        return now
    return (
        torch.zeros(stored.shape, dtype=dtype, device=holder.device)
        if whole
        else torch.zeros_like(holder.data, dtype=dtype)
    )


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


def load_groups(state: LiveState, reader: CheckpointReader) -> None:
    """What the optimizer had changed itself in its groups, and what it kept of no parameter."""
    facts = _facts_of(state, reader)
    for group, changed in zip(state.optimizer.param_groups, facts.get("groups", []), strict=False):
        for key, value in changed.items():
            group[key] = _like(group.get(key), value)
    for key, value in facts.get("state", {}).items():
        state.optimizer.state[key] = _like(state.optimizer.state.get(key), value)


def _like(now: Any, value: Any) -> Any:
    if isinstance(now, torch.Tensor):
        return now.fill_(value)
    return tuple(value) if isinstance(now, tuple) else copy.deepcopy(value)
