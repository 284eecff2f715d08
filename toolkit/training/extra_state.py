"""What a checkpoint holds beside weights and optimizer: the random generators of each rank, and
what the recipe has registered with `accelerator.register_for_checkpointing`."""

from __future__ import annotations

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
        "torch": torch.get_rng_state().tolist(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restores what `random_states` returned on a device of the same type."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if "cuda" in states:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))


def registered_content(accelerator: Accelerator) -> bytes:
    """objects.pt: the states of what the recipe registered. Raises UserError for what cannot be
    read back without executing code, and for shards."""
    objects = require(accelerator, "_custom_objects", "accelerate")
    file = io.BytesIO()
    try:
        states = [each.state_dict() for each in objects]
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(states)):
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
    """Loads these states. Raises UserError unless the recipe registers as many objects as it did
    when it saved."""
    objects = require(accelerator, "_custom_objects", "accelerate")
    states = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if len(states) != len(objects):
        raise UserError(
            f"the checkpoint has {len(states)} states of accelerator.register_for_checkpointing, "
            f"which got {len(objects)} objects before `run.steps`: use the same recipe, or another "
            "--output_dir"
        )
    for each, state in zip(objects, states, strict=True):
        each.load_state_dict(state)
