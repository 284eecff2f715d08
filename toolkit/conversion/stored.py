"""A checkpoint as its tensors by name, each of which is read only when it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from toolkit.errors import UserError, listing

T = TypeVar("T", "Stored", torch.Tensor)
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
    base_model: str = ""
    """The name of the model whose frozen parameters were left out; empty if none were."""
    checks: tuple[Check, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """Only the tensors of `names`, under their new names. Raises UserError if two get the same
        one."""
        tensors = {new: self.tensors[old] for old, new in names.items()}
        if len(tensors) < len(names):
            raise UserError(
                f"{self.path} has tensors that would get the same name; for a part: --prefix NAME"
            )
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
            choices = listing(self.tensors, 3) or "none"
            raise UserError(
                f"{self.path} has no tensors of names {prefix}*; it has {choices}"
            )
        return self.renamed(names)


def model_states(values: Mapping[tuple[Any, ...], T]) -> dict[str, T]:
    """The model's state in nested dicts: what is in the innermost dict that has all weights, those
    of optimizers aside. Several models in it keep the keys of theirs as prefixes.

    `values`: by their keys from the outermost dict to the innermost. Returns them by name."""
    state = {}
    for keys, value in values.items():
        if all(isinstance(key, str) and not key.startswith("optim") for key in keys):
            state[keys] = value
    weights = []
    for keys, value in state.items():
        if value.dtype.is_floating_point and value.shape:
            weights.append(keys[:-1])
    if not weights:
        return {}
    outer = weights[0]
    while any(keys[: len(outer)] != outer for keys in weights):
        outer = outer[:-1]
    depth = len(outer)
    return {
        ".".join(keys[depth:]): each
        for keys, each in state.items()
        if keys[:depth] == outer
    }
