"""A checkpoint as its tensors by name, each of which is read only when it is written."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from toolkit.errors import UserError, listing

T = TypeVar("T")
Check = Callable[[], None]
"""Reads a part of a checkpoint. Raises UserError if it is damaged."""
# of DDP, torch.compile, FSDP, activation checkpointing and Lightning's strategies
_WRAPPERS = re.compile(
    r"^(module\.|_orig_mod\.|_forward_module\.)+"
    r"|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a checkpoint. Tied weights are one object under several names."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Sequence[torch.Tensor]]
    """Reads its elements, as one or more consecutive tensors, which may be views of mapped files:
    they must not be changed."""

    def read(self) -> torch.Tensor:
        """The whole tensor."""
        return torch.cat([piece.reshape(-1) for piece in self.pieces()]).view(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """What a path contains; none of its tensors has been read."""

    path: Path
    tensors: Mapping[str, Stored]
    step: int | None = None
    model_folder: Path | None = None
    """The folder with the model's config, if the checkpoint has one."""
    excluded: Mapping[str, list[int]] = field(default_factory=dict)
    """Shapes of the frozen parameters that were left out, by name."""
    base_model: str = ""
    """The model from which those come: a folder, or a name on the hub."""
    base_identity: str = ""
    """Its digest when it was a folder."""
    checks: tuple[Check, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """Only the tensors of `names`, under their new names. Raises UserError if two get the same
        one."""
        tensors = {new: self.tensors[old] for old, new in names.items()}
        if len(tensors) < len(names):
            raise UserError(f"{self.path} has tensors that would get the same name")
        return replace(self, tensors=tensors)

    def select(self, prefix: str) -> Checkpoint:
        """The tensors under `prefix`, without it and without the names of wrappers. Raises
        UserError if there are none."""
        prefix = prefix and prefix.rstrip(".") + "."
        names = {}
        for name in self.tensors:
            if name.startswith(prefix):
                names[name] = _WRAPPERS.sub("", name.removeprefix(prefix))
        if not names:
            choices = listing(self.tensors, 3)
            raise UserError(f"{self.path} has no tensors under --prefix {prefix}; it has {choices}")
        return self.renamed(names)


def model_states(
    values: Mapping[tuple[Any, ...], T], is_weight: Callable[[T], bool]
) -> dict[str, T]:  # fmt: skip
    """Finds the model's state in nested dicts: a dict that has weights in it, and is no
    optimizer's.

    `values`: by their keys from the outermost dict to the innermost. Returns the values of that
    dict by name; of several dicts under names that begin with the keys of theirs.
    """
    states: dict[tuple[Any, ...], dict[str, T]] = defaultdict(dict)
    for keys, value in values.items():
        if all(isinstance(key, str) and not key.startswith("optim") for key in keys):
            states[keys[:-1]][keys[-1]] = value
    models = {keys: state for keys, state in states.items() if any(map(is_weight, state.values()))}
    if len(models) == 1:
        return models.popitem()[1]
    every: dict[str, T] = {}
    for keys, state in models.items():
        every |= {".".join((*keys, name)): value for name, value in state.items()}
    return every
