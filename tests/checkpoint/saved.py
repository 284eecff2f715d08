"""Saves states as toolkit/training/checkpoints.py does, without a run."""

import itertools
from pathlib import Path
from typing import Any

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.parameters import tied_names
from toolkit.checkpoint.state import LiveState


def save_state(live: LiveState, folder: Path, step: int, **facts: Any) -> None:
    """All ranks must call it."""
    tables = {
        folders.WEIGHTS_FILE: live.weight_shapes(),
        folders.OPTIMIZER_FILE: live.optimizer_shapes(),
    }
    optimizer = {"class": live.algorithm, "groups": live.changed_groups()}
    state = {"step": step, "world": live.world, "tied": tied_names(live.module),
             "excluded": {}, "optimizer": optimizer}  # fmt: skip
    fragments = (live.weights(), live.moments())
    parts = [
        live.gather(shapes, part) for shapes, part in zip(tables.values(), fragments, strict=True)
    ]
    tensors = itertools.chain(*parts)
    if live.rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folders.save(folder, tables, tensors, {**state, **facts}, lambda draft: None)
    else:
        for _ in tensors:
            pass
