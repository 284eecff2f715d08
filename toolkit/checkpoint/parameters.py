"""Parameters and buffers of a model under any strategy: names, shapes, what this rank has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def reshard(module: torch.nn.Module) -> None:
    """Reshards FSDP2's modules: the root keeps its parameters unsharded from an evaluation to the
    next backward."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state_dict has, shared ones once."""
    for name, buffer in module.named_buffers():
        owner, _, short = name.rpartition(".")
        if short not in module.get_submodule(owner)._non_persistent_buffers_set:
            yield name, buffer


def floating_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent ones that are not integers: running means, but not counts."""
    return (
        (name, each)
        for name, each in persistent_buffers(module)
        if each.is_floating_point()
    )


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Another name of a parameter -> the name under which it is saved."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = module.named_parameters(remove_duplicate=False)
    return {name: first[id(each)] for name, each in names if first[id(each)] != name}


def full_shape(parameter: Any) -> tuple[int, ...]:
    """The unsharded shape of a parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def range_of_stage3(parameter: Any, padded: int) -> tuple[int, int]:
    """(first element, number of elements) of this rank's shard under ZeRO-3; `padded`: its elements
    with padding."""
    start = torch.distributed.get_rank(parameter.ds_process_group) * padded
    return start, max(0, min(padded, parameter.ds_numel - start))


def local_shard(parameter: Any) -> tuple[int, torch.Tensor]:
    """(first element, (n,) view) of this rank's shard: of ZeRO-3, of a DTensor sharded by rows, or
    the whole tensor."""
    if hasattr(parameter, "ds_tensor"):
        start, count = range_of_stage3(parameter, parameter.ds_tensor.numel())
        return min(start, parameter.ds_numel), parameter.ds_tensor.data.view(-1)[:count]
    start = 0
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        _, offsets = compute_local_shape_and_global_offset(
            parameter.shape, mesh, placements
        )
        start = offsets[0] * math.prod(parameter.shape[1:])
    return start, local(parameter).view(-1)


def local(tensor: Any) -> torch.Tensor:
    """This rank's rows of a DTensor; any other tensor itself."""
    return tensor.to_local().data if isinstance(tensor, DTensor) else tensor.data
