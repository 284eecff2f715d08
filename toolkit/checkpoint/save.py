"""Writes the training state as safetensors files; under DeepSpeed the engine writes its own files instead."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from toolkit.checkpoint.folder import OPTIMIZER_FILE, WEIGHTS_FILE
from toolkit.checkpoint.live import (
    DTYPE_NAMES,
    LiveState,
    changed_hyperparameters,
    full_shape,
    group_json,
    is_json,
    split_state,
)
from toolkit.checkpoint.safetensors_header import Layout
from toolkit.checkpoint.tensor_index import crc32, crc32_combine
from toolkit.errors import UserError, first_line, listing
from toolkit.utils.compat import require
from toolkit.utils.files import as_json

OBJECTS_FILE = "objects.pt"


@dataclass(frozen=True)
class Draft:
    """A safetensors file to write."""

    name: str
    """Its name in the checkpoint's folder."""
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]

    @property
    def layout(self) -> Layout:
        tensors = {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return Layout(tensors, self.metadata, checksums=True)

    def copy_to_host(self) -> Draft:
        """A draft with copies of the tensors in host memory, which training does not change."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}
        return Draft(self.name, copies, self.metadata)


def make_drafts(state: LiveState, excluded: set[str]) -> list[Draft]:
    """The files that this rank writes, without the `excluded` parameters: unsharded state is written by rank 0 alone.

    The drafts refer to the live tensors: nothing is copied.
    """
    sharded = state.file_format == "slices"
    if state.rank != 0 and not sharded:
        return []
    parameters, buffers = dict(state.module.named_parameters()), dict(state.module.named_buffers())
    shapes = {name: full_shape(tensor) for name, tensor in (parameters | buffers).items()}
    weights, states = {}, {}
    places: dict[str, dict[str, Any]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for fragment in state.fragments():
        name, shape = fragment.name, shapes[fragment.name]
        # buffers and unsharded tensors are the same on all ranks
        if name in excluded or (state.rank != 0 and fragment.values.numel() == math.prod(shape)):
            continue
        weights[name] = fragment.values if sharded else fragment.values.view(shape)
        elements = {"buffer" if name in buffers else "weight": fragment.values} if sharded else {}
        for key, values in {**elements, **fragment.state.elements}.items():
            states[f"{key}.{name}"] = values if sharded else values.view(shape)
            places[f"{key}.{name}"] = {"shape": list(shape), "start": fragment.start}
        scalars = fragment.state.scalars
        counts = {key: value for key, value in scalars.items() if isinstance(value, torch.Tensor)}
        for key, values in {**fragment.state.factors, **counts}.items():
            states[f"{key}.{name}"] = values.view(1) if sharded else values
            places[f"{key}.{name}"] = {"shape": [], "start": 0}
        if plain := {key: value for key, value in scalars.items() if key not in counts}:
            numbers[name] = plain
    metadata = {"numbers": json.dumps(numbers, ensure_ascii=False)} if numbers else {}
    if sharded:
        metadata = {"slices": json.dumps(places, ensure_ascii=False), **metadata}
        return [Draft(f"slices-rank-{state.rank:05d}.safetensors", states, metadata)]
    return [Draft(WEIGHTS_FILE, weights, {"format": "pt"}), Draft(OPTIMIZER_FILE, states, metadata)]


def optimizer_facts(state: LiveState) -> dict[str, Any]:
    """For the manifest: the optimizer's class, the hyperparameters it has changed in its groups, and its state that
    belongs to no parameter; with `ranks`, by rank, if they differ. All ranks must call it.

    Raises UserError naming state that cannot be saved.
    """
    optimizer = state.optimizer
    _check_savable(state)
    groups = changed_hyperparameters(optimizer)
    others = {key: group_json(value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    for key, value in [entry for table in (*groups, others) for entry in table.items()]:
        if not isinstance(key, str) or not is_json(value):
            raise _unsavable_error(optimizer, key, value, "outside its parameters' state")
    ranks: list[Any] = [{"groups": groups, "state": others}] * state.world
    if state.world > 1:
        torch.distributed.all_gather_object(ranks, ranks[0])
    facts = ranks[0] if all(other == ranks[0] for other in ranks) else {"ranks": ranks}
    return {"class": type(optimizer).__name__, **facts}


def _check_savable(state: LiveState) -> None:
    optimizer, tensors = state.optimizer, list(state.optimizer_tensors())
    for tensor, names in tensors:
        kinds = split_state(optimizer, tensor)
        factors = kinds.factors if state.file_format != "whole" else {}
        for key, value in {**kinds.unknown, **factors}.items():
            raise _unsavable_error(optimizer, key, value, f"of {names[0]} under {state.strategy}")
    known = {id(tensor) for tensor, _ in tensors}
    foreign = [tensor for group in optimizer.param_groups for tensor in group["params"] if id(tensor) not in known]
    if foreign and state.file_format != "deepspeed":
        fault = f"{type(optimizer).__name__} trains a tensor of shape {list(foreign[0].shape)}"
        raise UserError(f"{fault} that is no parameter of the model and would not be saved: register it in the model")


def _unsavable_error(optimizer: Any, key: object, value: Any, where: str) -> UserError:
    kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    fault = f"{type(optimizer).__name__} has {key} ({kind}) {where}, which cannot be saved"
    return UserError(f"{fault}: choose another optimizer, or train without checkpoints")


def write(draft: Draft, folder: Path) -> dict[str, Any]:
    """Streams the tensors to the disk, each with its CRC32, and flushes the file.

    Returns the file's manifest entry, without reading the file again.
    """
    layout = draft.layout
    checksums: dict[str, int] = {}
    data_crc32 = 0
    with (folder / draft.name).open("xb") as file:
        file.write(layout.header())  # a placeholder of the final header's length
        for name in layout.offsets:
            content = bytes_of(draft.tensors[name])
            checksums[name] = crc32(content)
            data_crc32 = crc32_combine(data_crc32, checksums[name], len(content))
            file.write(content)
        header = layout.header(checksums)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    file_crc32 = crc32_combine(crc32(header), data_crc32, layout.size - len(header))
    return {"bytes": layout.size, "crc32": f"{file_crc32:08x}"}


def bytes_of(values: torch.Tensor) -> memoryview:
    """A tensor's bytes, without a copy if it is contiguous in host memory."""
    content: Any = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(content)


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """The files that a rank wrote, by the rank in their names; those without one are rank 0's."""
    names = []
    for path in sorted(folder.rglob("*")):
        match = re.search(r"(?:zero_pp_rank_|-rank-)(\d+)", path.name)
        if path.is_file() and not path.name.startswith(".") and int(match[1] if match else 0) == rank:
            names.append(path.relative_to(folder).as_posix())
    return names


def objects_content(accelerator: Accelerator) -> bytes:
    """The file with the states of what `accelerator.register_for_checkpointing` got; empty without any. Raises
    UserError for shards, and for what only pickle's code could load."""
    objects, file = require(accelerator, "_custom_objects", "accelerate"), io.BytesIO()
    try:
        torch.save(states := [each.state_dict() for each in objects], file)
        file.seek(0)
        torch.load(file, map_location="meta", weights_only=True)  # without a second copy of an average, say
        trained = [getattr(each, "param_groups", []) for each in objects]  # before an optimizer has any state
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves([states, trained])):
            raise TypeError("it has shards")
    except Exception as error:
        names = listing([type(each).__name__ for each in objects], 4)
        why = "an object of another class" if isinstance(error, pickle.UnpicklingError) else first_line(error)
        raise UserError(
            f"accelerator.register_for_checkpointing({names}): a state_dict() cannot be saved ({why}): "
            "make it of whole tensors, numbers, strings, lists and dicts"
        ) from error
    return file.getvalue() if objects else b""


def load_objects(accelerator: Accelerator, folder: Path) -> None:
    """Loads these states. Raises UserError unless the recipe registers as many objects as when it saved."""
    objects, path = require(accelerator, "_custom_objects", "accelerate"), folder / OBJECTS_FILE
    states = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else []
    if len(states) != len(objects):
        raise UserError(
            f"{folder} has {len(states)} states of accelerator.register_for_checkpointing, which got {len(objects)} "
            "objects before `run.resume`: use the same recipe, or another --output_dir"
        )
    for each, state in zip(objects, states, strict=True):
        try:
            each.load_state_dict(state)
        except Exception as error:
            fault = f"{path}: {type(each).__name__}.load_state_dict() failed: {first_line(error)}"
            raise UserError(f"{fault}: use the same recipe, or another --output_dir") from error


def random_file(rank: int) -> str:
    """The name of a rank's file of random states."""
    return f"rng-rank-{rank:05d}.json"


def random_states(accelerator: Accelerator) -> dict[str, Any]:
    """The states of all random generators that training uses, as JSON can hold them."""
    states = {
        "python": random.getstate(),
        "numpy": as_json(np.random.get_state()),
        "torch": _base64(torch.get_rng_state()),
    }
    if accelerator.device.type == "cuda":
        states["cuda"] = _base64(torch.cuda.get_rng_state())
    return states


def _base64(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def set_random_states(states: Mapping[str, Any]) -> None:
    """Raises TypeError, ValueError, LookupError, OverflowError or RuntimeError for invalid states."""

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensor(states["torch"]))
    if torch.cuda.is_available():
        if "cuda" in states:
            torch.cuda.set_rng_state(tensor(states["cuda"]))
        else:  # saved on a CPU: from that rank's seed, since all GPUs still have the one of the weights
            torch.cuda.manual_seed(torch.initial_seed())
