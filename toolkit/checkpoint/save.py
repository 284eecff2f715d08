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

from toolkit.checkpoint.checksum import combine, crc32
from toolkit.checkpoint.live import Fragment, LiveState, whole_shape
from toolkit.checkpoint.optimizer_state import DTYPE_NAMES, changed_groups, is_plain, kept_of
from toolkit.checkpoint.tensors_file import Layout, lay_out
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
        described = {name: (DTYPE_NAMES[values.dtype], shape) for name, (values, shape) in self.tensors.items()}
        return lay_out(described, self.metadata, checksums=True)

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
    fragments, weights, kept = [], {}, {}
    places: dict[str, dict[str, Any]] = {}
    for part in state.fragments():
        shape = shapes[part.name]
        # buffers, and what is not sharded, are whole in every process
        everywhere = not sharded or part.values.numel() == math.prod(shape)
        if part.name in excluded or (everywhere and rank != 0):
            continue
        fragments.append(part)
        weights[part.name] = (part.values, shape)
        elements = {"buffer" if part.name in buffers else "weight": part.values} if sharded else {}
        for key, values in {**elements, **part.state}.items():
            kept[f"{key}.{part.name}"] = (values, (values.numel(),) if sharded else shape)
            places[f"{key}.{part.name}"] = {"shape": list(shape), "start": part.start}
        counts = {key: value for key, value in part.scalars.items() if isinstance(value, torch.Tensor)}
        for key, values in {**part.factors, **counts}.items():
            kept[f"{key}.{part.name}"] = (values, (1,) if sharded else tuple(values.shape))
            places[f"{key}.{part.name}"] = {"shape": [], "start": 0}
    if sharded:
        table = {"slices": json.dumps(places, ensure_ascii=False)}
        return [Draft(f"slices-rank-{rank:05d}.safetensors", kept, table | _numbers(fragments))]
    if rank != 0:
        return []
    return [Draft(WEIGHTS_FILE, weights, {"format": "pt"}), Draft(OPTIMIZER_FILE, kept, _numbers(fragments))]


def _numbers(fragments: list[Fragment]) -> dict[str, str]:
    """For a file's metadata: what the optimizer keeps of a parameter that is no tensor."""
    numbers = {
        part.name: {key: value for key, value in part.scalars.items() if not isinstance(value, torch.Tensor)}
        for part in fragments
    }
    numbers = {name: found for name, found in numbers.items() if found}
    return {"numbers": json.dumps(numbers, ensure_ascii=False)} if numbers else {}


def optimizer_facts(state: LiveState) -> dict[str, Any]:
    """For the manifest: the optimizer's class, what it has changed in its groups, and what it keeps of no parameter.
    Where the processes differ in that, `ranks` holds each one's. All processes call this.

    Raises UserError that names what the optimizer keeps and no checkpoint can hold.
    """
    optimizer = state.optimizer
    _refuse_unsavable(state)
    groups = changed_groups(optimizer)
    loose = {key: as_json(value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    named = [entry for table in (*groups, loose) for entry in table.items()]
    for key, value in named:
        if not isinstance(key, str) or not is_plain(value):
            raise _cannot_be_saved(optimizer, f"{key} ({_described(value)}) beside its parameters")
    everyone: list[Any] = [{"groups": groups, "state": loose}] * state.world
    if state.world > 1:
        torch.distributed.all_gather_object(everyone, everyone[0])
    shared = everyone[0] if all(other == everyone[0] for other in everyone) else {"ranks": everyone}
    return {"class": type(optimizer).__name__, **shared}


def _refuse_unsavable(state: LiveState) -> None:
    optimizer, holders = state.optimizer, list(state.holders())
    for holder, names in holders:
        kept = kept_of(optimizer, holder)
        flat = kept.factors if state.strategy_files != "whole" else {}
        for key, value in {**kept.unknown, **flat}.items():
            raise _cannot_be_saved(optimizer, f"{key} ({_described(value)}) of {names[0]} under {state.strategy}")
    known = {id(holder) for holder, _ in holders}
    strangers = [tensor for group in optimizer.param_groups for tensor in group["params"] if id(tensor) not in known]
    if strangers and state.strategy_files != "deepspeed":
        raise UserError(
            f"{type(optimizer).__name__} trains a parameter of shape {list(strangers[0].shape)} that is not the "
            "model's, and would not be saved: make it a parameter of the model"
        )


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _cannot_be_saved(optimizer: Any, what: str) -> UserError:
    return UserError(
        f"{type(optimizer).__name__} keeps {what}, which no checkpoint can hold: choose another optimizer, or train "
        "without checkpoints"
    )


def write(draft: Draft, folder: Path) -> dict[str, Any]:
    """Streams the tensors from where they lie, each with its CRC32, and flushes the file to the disk.

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
            of_data = combine(of_data, checksums[name], len(content))
            file.write(content)
        header = layout.header(checksums)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    whole = combine(crc32(header), of_data, layout.size - len(header))
    return {"bytes": layout.size, "crc32": f"{whole:08x}"}


def bytes_of(values: torch.Tensor) -> memoryview:
    """Of a tensor, without a copy where it lies in host memory."""
    content: Any = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(content)


def written_by(folder: Path, rank: int) -> list[str]:
    """The files of the folder that this process wrote, known by their names; rank 0 wrote the nameless ones."""
    found = []
    for path in sorted(folder.rglob("*")):
        named = re.search(r"(?:zero_pp_rank_|-rank-)(\d+)", path.name)
        if path.is_file() and not path.name.startswith(".") and int(named[1] if named else 0) == rank:
            found.append(path.relative_to(folder).as_posix())
    return found


def random_file(rank: int) -> str:
    """The name, in a checkpoint's folder, of a process's random states."""
    return f"rng-rank-{rank:05d}.json"


def random_states(accelerator: Accelerator) -> dict[str, Any]:
    """Of every generator that training draws from, fit for JSON."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _text_of(torch.get_rng_state()),
    }
    if accelerator.device.type == "cuda":
        states["cuda"] = _text_of(torch.cuda.get_rng_state())
    return states


def _text_of(state: torch.Tensor) -> str:
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
