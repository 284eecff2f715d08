"""Writing the training state: our safetensors files where PyTorch holds it, DeepSpeed's own where it does."""

from __future__ import annotations

import base64
import json
import math
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from toolkit.checkpoint.checksum import combine, crc32
from toolkit.checkpoint.disks import Disks
from toolkit.checkpoint.live import TORCH_DTYPES, Fragment, LiveState, adam_step, whole_shape
from toolkit.checkpoint.tensors_file import Layout, lay_out

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


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
        described = {name: (_DTYPES[values.dtype], shape) for name, (values, shape) in self.tensors.items()}
        return lay_out(described, self.metadata, checksums=True)

    def copied(self) -> Draft:
        """With copies of the values in host memory, which training does not change."""
        copies = {name: (values.detach().to("cpu", copy=True), shape) for name, (values, shape) in self.tensors.items()}
        return Draft(self.name, copies, self.metadata)


def drafts_of(state: LiveState, excluded: set[str], rank: int) -> list[Draft]:
    """The files this process writes of a state that PyTorch holds; `excluded` parameters are left out.

    Whole states are written by rank 0 alone. Nothing is copied: the drafts refer to the live tensors.
    """
    if state.strategy_files == "slices":
        return [_slices(state, excluded, rank)]
    if rank != 0:
        return []
    shapes = _shapes(state)
    fragments = [fragment for fragment in state.fragments() if fragment.name not in excluded]
    weights = {fragment.name: (fragment.values, shapes[fragment.name]) for fragment in fragments}
    moments = {name: entry for fragment in fragments for name, entry in _moments(fragment, shapes).items()}
    return [Draft(WEIGHTS_FILE, weights, {"format": "pt"}), Draft(OPTIMIZER_FILE, moments, {})]


def _shapes(state: LiveState) -> dict[str, tuple[int, ...]]:
    named = [*state.module.named_parameters(), *state.module.named_buffers()]
    return {name: whole_shape(tensor) for name, tensor in named}


def _moments(fragment: Fragment, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    if not fragment.moments:
        return {}
    found: dict[str, Any] = {
        f"{key}.{fragment.name}": (values, shapes[fragment.name]) for key, values in fragment.moments.items()
    }
    found[f"step.{fragment.name}"] = (torch.tensor(adam_step(fragment.adam)), ())
    return found


def _slices(state: LiveState, excluded: set[str], rank: int) -> Draft:
    shapes = _shapes(state)
    buffers = {name for name, _ in state.module.named_buffers()}
    tensors: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
    places: dict[str, dict[str, Any]] = {}
    for fragment in state.fragments():
        whole = fragment.values.numel() == math.prod(shapes[fragment.name])
        if fragment.name in excluded or (whole and rank != 0):
            continue  # every process has it, as buffers and what is not divided: rank 0 writes it
        kind = "buffer" if fragment.name in buffers else "weight"
        values = {kind: fragment.values, **fragment.moments}
        for key, part in values.items():
            tensors[f"{key}.{fragment.name}"] = (part, (part.numel(),))
            places[f"{key}.{fragment.name}"] = {"shape": list(shapes[fragment.name]), "start": fragment.start}
        if fragment.moments:
            tensors[f"step.{fragment.name}"] = (torch.tensor([adam_step(fragment.adam)]), (1,))
            places[f"step.{fragment.name}"] = {"shape": [], "start": 0}
    return Draft(f"slices-rank-{rank:05d}.safetensors", tensors, {"slices": json.dumps(places, ensure_ascii=False)})


def write(draft: Draft, folder: Path) -> dict[str, Any]:
    """Streams the tensors from where they lie, each with its CRC32, and flushes the file to the disk.

    Returns the file's entry for the manifest: the bytes are not read again for it.
    """
    layout = draft.layout
    checksums: dict[str, int] = {}
    of_data = 0
    with (folder / draft.name).open("wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(layout.header()))  # in the place of the true one, which is as long
        for name in layout.tensors:
            content = bytes_of(draft.tensors[name][0])
            checksums[name] = crc32(content)
            of_data = combine(of_data, checksums[name], len(content))
            write_all(file.fileno(), content)
        header = layout.header(checksums)
        os.pwrite(file.fileno(), header, 0)
        os.fsync(file.fileno())
    whole = combine(crc32(header), of_data, layout.size - len(header))
    return {"bytes": layout.size, "crc32": f"{whole:08x}"}


def bytes_of(values: torch.Tensor) -> memoryview:
    """Of a tensor, without a copy where it lies in host memory."""
    content: Any = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(content)


def write_all(descriptor: int, content: memoryview) -> None:
    """To an open file, at its place."""
    while len(content):  # one call writes 2 GiB at most
        content = content[os.write(descriptor, content) :]


def write_deepspeed(engine: Any, folder: Path, step: int, exclude_frozen: bool) -> None:
    """Collective: DeepSpeed's own files, with its `latest`, which its own tools read."""
    engine.save_checkpoint(
        str(folder), tag=f"global_step{step}", save_latest=True, exclude_frozen_parameters=exclude_frozen
    )


def written_by(folder: Path, rank: int) -> list[str]:
    """The files of the folder that this process wrote, known by their names; rank 0 wrote the nameless ones."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".") and _rank_of(path.name) == rank:
            found.append(path.relative_to(folder).as_posix())
    return found


def _rank_of(name: str) -> int:
    for mark in ("zero_pp_rank_", "-rank-"):
        _, found, rest = name.partition(mark)
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        if found and digits:
            return int(digits)
    return 0


def write_random_states(accelerator: Accelerator, disks: Disks, folder: Path) -> list[str]:
    """A file per process, written by itself, or by rank 0 for those that do not find rank 0's disk: what a process
    draws is no reason for a checkpoint to need the files of two machines.

    All processes call this; returns the names that this one wrote for others.
    """
    rank, text = accelerator.process_index, json.dumps(random_states(accelerator))
    if disks.first:
        (folder / random_file(rank)).write_text(text, encoding="utf-8")
    if disks.shared:
        return []
    far = [found for found in gather_object([None if disks.first else (random_file(rank), text)]) if found is not None]
    for name, other in far if rank == 0 else []:
        (folder / name).write_text(other, encoding="utf-8")
    return [name for name, _ in far] if rank == 0 else []


def random_file(rank: int) -> str:
    """The name, in a checkpoint's folder, of a process's random states."""
    return f"rng-rank-{rank:05d}.json"


def random_states(accelerator: Accelerator) -> dict[str, Any]:
    """Of every generator that training draws from, fit for JSON."""

    def text(state: torch.Tensor) -> str:
        return base64.b64encode(state.numpy().tobytes()).decode()

    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": text(torch.get_rng_state()),
    }
    if accelerator.device.type == "cuda":
        states["cuda"] = text(torch.cuda.get_rng_state())
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(states["cuda"]))
