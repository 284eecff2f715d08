"""A saved state into the live one, whatever strategy and number of processes saved it.

Each process reads the elements it owns, slice by slice: nobody holds more of the optimizer's state than
its own share and one block.
"""

from __future__ import annotations

import math

import torch

from toolkit.checkpoint.live import (
    MOMENTS,
    TORCH_DTYPES,
    Fragment,
    LiveState,
    persistent_buffers,
    set_adam_step,
    whole_shape,
)
from toolkit.checkpoint.reader import CheckpointReader, TensorIndex
from toolkit.errors import Faults, UserError, listing

_BLOCK = 4 << 20  # elements: 16 MiB of fp32


def restore(state: LiveState, reader: CheckpointReader, steps: int) -> None:
    """Fills weights, moments, Adam's counts and buffers. All processes call this.

    Raises UserError, before anything is changed, when the checkpoint is not of this model or has no
    optimizer state for a parameter that is trained.
    """
    _refuse_other_model(state, reader)
    _refuse_uneven_steps(state, reader)
    state.before_loading()
    with torch.no_grad():
        for fragment in state.fragments():
            _fill_fragment(fragment, reader)
    state.after_loading(steps)


def _fill_fragment(fragment: Fragment, reader: CheckpointReader) -> None:
    stored = _stored(reader, fragment.name)
    if stored is None:
        return  # left out on purpose: it has the base model's values
    fill(fragment.values, stored, fragment.start)
    name = _saved_name(reader, fragment.name)
    if name not in reader.moments:
        return  # frozen; or without elements, of which DeepSpeed saves nothing
    for key, values in fragment.moments.items():
        fill(values, reader.moments[name][key], fragment.start)
    if fragment.moments:
        set_adam_step(fragment.adam, reader.adam_steps[name])


def fill(target: torch.Tensor, stored: TensorIndex, start: int) -> None:
    """Copies elements [start, start + n) of a stored tensor into a (n,) tensor, block by block."""
    for first in range(0, target.numel(), _BLOCK):
        count = min(_BLOCK, target.numel() - first)
        block = torch.frombuffer(stored.read(start + first, count), dtype=TORCH_DTYPES[stored.dtype])
        target.narrow(0, first, count).copy_(block)


def _saved_name(reader: CheckpointReader, name: str) -> str:
    return reader.tied.get(name, name)


def _stored(reader: CheckpointReader, name: str) -> TensorIndex | None:
    name = _saved_name(reader, name)
    return reader.weights.get(name) or reader.buffers.get(name)


def _refuse_other_model(state: LiveState, reader: CheckpointReader) -> None:
    parameters = {name: (whole_shape(tensor), tensor.requires_grad) for name, tensor in _named(state)}
    aliases = {name for name, _ in state.module.named_parameters(remove_duplicate=False)}
    faults = Faults()
    missing = [name for name in parameters if _stored(reader, name) is None and name not in reader.excluded]
    if missing:
        faults.add(f"{reader.path} lacks {listing(missing, 4)}, which the model has")
    left = [name for name in reader.weights if name not in parameters and name not in aliases]
    if left:
        faults.add(f"{reader.path} holds {listing(left, 4)}, which the model has not")
    for name, (shape, trained) in parameters.items():
        stored = _stored(reader, name)
        if stored is not None and stored.shape != shape:
            faults.add(f"{reader.path}: {name} has shape {list(stored.shape)}, and {list(shape)} in the model")
        elif trained and math.prod(shape) > 0 and not _has_moments(reader, name):
            faults.add(f"{reader.path} has no optimizer state for {name}, which is trained here and was not there")
    if len(faults.found) > 4:
        faults.found[4:] = [f"and {len(faults.found) - 4} more of the kind"]
    faults.raise_if_any()


def _has_moments(reader: CheckpointReader, name: str) -> bool:
    return set(MOMENTS) <= reader.moments.get(_saved_name(reader, name), {}).keys()


def _named(state: LiveState) -> list[tuple[str, torch.Tensor]]:
    return [*state.module.named_parameters(), *persistent_buffers(state.module)]


def _refuse_uneven_steps(state: LiveState, reader: CheckpointReader) -> None:
    """Flattened parameters share one count of steps: parts of another age cannot be put among them.

    Asked of the reader alone, so that all processes answer alike, whatever each of them owns.
    """
    counts: dict[float, str] = {}
    for name, parameter in state.module.named_parameters():
        if not parameter.requires_grad or not math.prod(whole_shape(parameter)):
            continue
        steps = reader.adam_steps.get(_saved_name(reader, name))
        if steps is None:
            raise UserError(f"{reader.path} does not say how many steps {name} has taken")
        counts.setdefault(steps, name)
    if len(counts) > 1 and state.strategy_files == "deepspeed":
        listed = " and ".join(f"{name} {steps:g}" for steps, name in list(counts.items())[:2])
        raise UserError(
            f"{reader.path}: not all parameters have taken the same number of steps ({listed}): only one process or "
            "data parallel can go on from that"
        )
