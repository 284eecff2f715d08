"""What a checkpoint holds beside weights and optimizer: the random generators of each rank, and
what the recipe has registered with `accelerator.register_for_checkpointing`."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from toolkit.errors import UserError, first_line, listing
from toolkit.utils.compat import require
from toolkit.utils.files import as_json


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of this process's random generators, as JSON can hold them."""
    states = {
        "python": random.getstate(),
        "numpy": as_json(np.random.get_state()),
        "torch": _to_text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _to_text(torch.cuda.get_rng_state())
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restores what `random_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_text(states["torch"]))
    if torch.cuda.is_available():
        if "cuda" in states:
            torch.cuda.set_rng_state(_from_text(states["cuda"]))
        else:
            # saved on a CPU: from that rank's seed, since all GPUs still have that of the weights
            torch.cuda.manual_seed(torch.initial_seed())


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def registered_content(accelerator: Accelerator) -> bytes:
    """objects.pt: the states of what the recipe registered; empty without any. Raises UserError for
    what cannot be read back without executing code, and for shards."""
    objects = require(accelerator, "_custom_objects", "accelerate")
    if not objects:
        return b""
    file = io.BytesIO()
    try:
        states = [each.state_dict() for each in objects]
        # an optimizer without any state yet has its tensors here
        groups = [getattr(each, "param_groups", []) for each in objects]
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves([states, groups])):
            raise TypeError("it has shards")
        torch.save(states, file)
        file.seek(0)
        torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:
        names = listing([type(each).__name__ for each in objects], 4)
        raise UserError(
            f"accelerator.register_for_checkpointing({names}): a state_dict() cannot be saved "
            f"({first_line(error)}): make it of whole tensors, numbers, strings, lists and dicts"
        ) from error
    return file.getvalue()


def load_registered(accelerator: Accelerator, content: bytes) -> None:
    """Loads these states. Raises UserError unless the recipe registers the objects that it did when
    it saved."""
    objects = require(accelerator, "_custom_objects", "accelerate")
    states = []
    if content:
        states = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    remedy = "use the same recipe, or another --output_dir"
    if len(states) != len(objects):
        raise UserError(
            f"the checkpoint has {len(states)} states of accelerator.register_for_checkpointing, "
            f"which got {len(objects)} objects before `run.steps`: {remedy}"
        )
    for each, state in zip(objects, states, strict=True):
        try:
            each.load_state_dict(state)
        except Exception as error:
            fault = f"{type(each).__name__}.load_state_dict() failed: {first_line(error)}"
            raise UserError(f"objects.pt of the checkpoint: {fault}: {remedy}") from error
