"""Writing the training state: our safetensors files where PyTorch holds it, DeepSpeed's own where it does."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from toolkit.checkpoint.checksums import crc32, crc32_combine
from toolkit.checkpoint.live import LiveState, whole_shape
from toolkit.checkpoint.optimizer_state import DTYPE_NAMES, changed_groups, is_plain, state_of
from toolkit.checkpoint.safetensors_header import Layout, lay_out
from toolkit.errors import UserError
from toolkit.utils.files import as_json, create_file

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True)
class Draft:
    """One safetensors file to be written."""

    name: str
    """In the checkpoint's folder."""
    tensors: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]
    """Name -> (values, shape)."""
    metadata: Mapping[str, str]

    @property
    def layout(self) -> Layout:
        tensors = {name: (DTYPE_NAMES[values.dtype], shape) for name, (values, shape) in self.tensors.items()}
        return lay_out(tensors, self.metadata, checksums=True)

    def copied(self) -> Draft:
        """With copies of the values in host memory, which training does not change."""
        copies = {name: (values.detach().to("cpu", copy=True), shape) for name, (values, shape) in self.tensors.items()}
        return Draft(self.name, copies, self.metadata)


def drafts_of(state: LiveState, excluded: set[str], rank: int) -> list[Draft]:
    """The files this process writes of a state that PyTorch holds; `excluded` parameters are left out.

    Whole states are written by rank 0 alone. Nothing is copied: the drafts refer to the live tensors.
    """
    sharded = state.strategy_files == "slices"
    parameters, buffers = dict(state.module.named_parameters()), dict(state.module.named_buffers())
    shapes = {name: whole_shape(tensor) for name, tensor in (parameters | buffers).items()}
    weights, states = {}, {}
    places: dict[str, dict[str, Any]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for fragment in state.fragments():
        name, shape = fragment.name, shapes[fragment.name]
        # buffers, and what is not sharded, are whole in every process
        replicated = not sharded or fragment.values.numel() == math.prod(shape)
        if name in excluded or (replicated and rank != 0):
            continue
        weights[name] = (fragment.values, shape)
        elements = {"buffer" if name in buffers else "weight": fragment.values} if sharded else {}
        for key, values in {**elements, **fragment.state}.items():
            states[f"{key}.{name}"] = (values, (values.numel(),) if sharded else shape)
            places[f"{key}.{name}"] = {"shape": list(shape), "start": fragment.start}
        counts = {key: value for key, value in fragment.scalars.items() if isinstance(value, torch.Tensor)}
        for key, values in {**fragment.factors, **counts}.items():
            states[f"{key}.{name}"] = (values, (1,) if sharded else tuple(values.shape))
            places[f"{key}.{name}"] = {"shape": [], "start": 0}
        if plain := {key: value for key, value in fragment.scalars.items() if key not in counts}:
            numbers[name] = plain
    metadata = {"numbers": json.dumps(numbers, ensure_ascii=False)} if numbers else {}
    if sharded:
        metadata = {"slices": json.dumps(places, ensure_ascii=False), **metadata}
        return [Draft(f"slices-rank-{rank:05d}.safetensors", states, metadata)]
    if rank != 0:
        return []
    return [Draft(WEIGHTS_FILE, weights, {"format": "pt"}), Draft(OPTIMIZER_FILE, states, metadata)]


def optimizer_facts(state: LiveState) -> dict[str, Any]:
    """For the manifest: the optimizer's class, what it has changed in its groups, and its state of no parameter.
    Where the processes differ in that, `ranks` has each one's. All processes call this.

    Raises UserError that names what the optimizer stores and no checkpoint can hold.
    """
    optimizer = state.optimizer
    _refuse_unsavable(state)
    groups = changed_groups(optimizer)
    loose = {key: as_json(value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    for key, value in [entry for table in (*groups, loose) for entry in table.items()]:
        if not isinstance(key, str) or not is_plain(value):
            raise _cannot_be_saved(optimizer, key, value, "beside its parameters")
    ranks: list[Any] = [{"groups": groups, "state": loose}] * state.world
    if state.world > 1:
        torch.distributed.all_gather_object(ranks, ranks[0])
    facts = ranks[0] if all(other == ranks[0] for other in ranks) else {"ranks": ranks}
    return {"class": type(optimizer).__name__, **facts}


def _refuse_unsavable(state: LiveState) -> None:
    optimizer, holders = state.optimizer, list(state.holders())
    for holder, names in holders:
        kinds = state_of(optimizer, holder)
        flattened = kinds.factors if state.strategy_files != "whole" else {}
        for key, value in {**kinds.unknown, **flattened}.items():
            raise _cannot_be_saved(optimizer, key, value, f"of {names[0]} under {state.strategy}")
    known = {id(holder) for holder, _ in holders}
    strangers = [tensor for group in optimizer.param_groups for tensor in group["params"] if id(tensor) not in known]
    if strangers and state.strategy_files != "deepspeed":
        fault = f"{type(optimizer).__name__} trains a parameter of shape {list(strangers[0].shape)}"
        raise UserError(f"{fault} that is not the model's, and would not be saved: make it a parameter of the model")


def _cannot_be_saved(optimizer: Any, key: object, value: Any, where: str) -> UserError:
    kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    fault = f"{type(optimizer).__name__} keeps {key} ({kind}) {where}, which no checkpoint can hold"
    return UserError(f"{fault}: choose another optimizer, or train without checkpoints")


def write(draft: Draft, folder: Path) -> dict[str, Any]:
    """Streams the tensors from memory to the disk, each with its CRC32, and flushes the file.

    Returns the file's entry for the manifest: the bytes are not read again for it.
    """
    layout = draft.layout
    checksums: dict[str, int] = {}
    of_data = 0
    with create_file(folder / draft.name) as file:
        file.write(layout.header())  # in the place of the true one, which is as long
        for name in layout.tensors:
            content = bytes_of(draft.tensors[name][0])
            checksums[name] = crc32(content)
            of_data = crc32_combine(of_data, checksums[name], len(content))
            file.write(content)
        header = layout.header(checksums)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    of_file = crc32_combine(crc32(header), of_data, layout.size - len(header))
    return {"bytes": layout.size, "crc32": f"{of_file:08x}"}


def bytes_of(values: torch.Tensor) -> memoryview:
    """Of a tensor, without a copy where it lies in host memory."""
    content: Any = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(content)


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """The files of the folder that this process wrote, by their names; those without a rank are rank 0's."""
    names = []
    for path in sorted(folder.rglob("*")):
        match = re.search(r"(?:zero_pp_rank_|-rank-)(\d+)", path.name)
        if path.is_file() and not path.name.startswith(".") and int(match[1] if match else 0) == rank:
            names.append(path.relative_to(folder).as_posix())
    return names


def random_file(rank: int) -> str:
    """The name, in a checkpoint's folder, of a process's random states."""
    return f"rng-rank-{rank:05d}.json"


def random_states(accelerator: Accelerator) -> dict[str, Any]:
    """Of every generator that training draws from, fit for JSON."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _base64(torch.get_rng_state()),
    }
    if accelerator.device.type == "cuda":
        states["cuda"] = _base64(torch.cuda.get_rng_state())
    return states


def _base64(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def set_random_states(states: Mapping[str, Any]) -> None:
    """Raises TypeError, ValueError, LookupError, OverflowError or RuntimeError where they are none."""

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(states["cuda"]))
