"""A saved state into the live one, whatever strategy and number of processes saved it.

Each process reads the elements it owns, block by block: nobody holds more of the optimizer's state than
its own shard and one block.
"""

from __future__ import annotations

import math

import torch

from toolkit.checkpoint.live import Fragment, LiveState, persistent_buffers, whole_shape
from toolkit.checkpoint.optimizer_state import TORCH_DTYPES
from toolkit.checkpoint.reader import CheckpointReader, TensorIndex
from toolkit.checkpoint.restore_optimizer import load_groups, make_state, refuse_other_optimizer
from toolkit.errors import Faults, listing

_BLOCK = 4 << 20  # elements: 16 MiB of fp32


def restore(state: LiveState, reader: CheckpointReader, steps: int) -> None:
    """Fills weights, the optimizer's state and buffers. All processes call this.

    Raises UserError, before anything is changed, when the checkpoint is not of this model, or of an optimizer
    whose state cannot be carried over.
    """
    _refuse_other_model(state, reader)
    refuse_other_optimizer(state, reader)
    state.before_loading()
    with torch.no_grad():
        make_state(state, reader)
        load_groups(state, reader)
        for fragment in state.fragments():
            _fill_fragment(fragment, reader)
    state.after_loading(steps)


def _fill_fragment(fragment: Fragment, reader: CheckpointReader) -> None:
    stored = _stored(reader, fragment.name)
    if stored is None:
        return  # left out on purpose: it has the base model's values
    fill(fragment.values, stored, fragment.start)
    kept = reader.optimizer_state.get(_saved_name(reader, fragment.name), {})
    for key, values in fragment.state.items():
        fill(values, kept[key], fragment.start)
    for key, values in fragment.factors.items():
        fill(values.view(-1), kept[key], 0)


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
        elif trained and math.prod(shape) > 0 and _saved_name(reader, name) in reader.frozen:
            faults.add(f"{reader.path} has no optimizer state for {name}, which is trained here and was not there")
    if len(faults.found) > 4:
        faults.found[4:] = [f"and {len(faults.found) - 4} more of the kind"]
    faults.raise_if_any()


def _named(state: LiveState) -> list[tuple[str, torch.Tensor]]:
    return [*state.module.named_parameters(), *persistent_buffers(state.module)]
