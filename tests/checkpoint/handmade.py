"""Writes small checkpoints, for tests that need no real ones."""

import functools
import io
import json
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from toolkit.checkpoint.live import LiveState, tied_names
from toolkit.checkpoint.save import Draft, files_of_rank, make_drafts, optimizer_facts, write

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.tensor_index import crc32_of_range

assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
"""Of two tensors, or two dicts of tensors."""


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], **metadata: str) -> None:
    write(Draft(file.name, tensors, metadata), file.parent)


def rewritten(file: Path, change: Callable[[str, bytes], bytes]) -> bytes:
    """A file of torch.save with changed members and their new checksums."""
    content = io.BytesIO()
    with zipfile.ZipFile(file) as read, zipfile.ZipFile(content, "w") as written:
        for name in read.namelist():
            written.writestr(name, change(name, read.read(name)))
    return content.getvalue()


def write_manifest(folder: Path, **manifest: Any) -> Path:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": f"{crc32_of_range(path):08x}"}
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": files, **manifest}))
    return folder


def write_run(folder: Path, tensors: Mapping[str, torch.Tensor], **manifest: Any) -> Path:
    """A run's checkpoint of one process."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "weights.safetensors", tensors, format="pt")
    return write_manifest(folder, **{"step": 7, "state": "whole", "strategy": "single", "world": 1, **manifest})


def save_state(
    state: LiveState, folder: Path, step: int, engine: Any = None, without: Collection[str] = (), **manifest: Any
) -> None:
    """As toolkit/training/checkpoints.py, without a run; all ranks must call it."""
    if state.rank == 0:
        folders.create_empty(folder)
    if dist.is_initialized():
        dist.barrier()
    if state.file_format == "deepspeed":
        engine.save_checkpoint(str(folder), tag=f"global_step{step}")
    else:
        for draft in make_drafts(state, set(without)):
            write(draft, folder)
    facts = optimizer_facts(state)
    entries: list[Any] = [folders.manifest_entries(folder, files_of_rank(folder, state.rank))] * state.world
    if dist.is_initialized():
        dist.all_gather_object(entries, entries[0])
    if state.rank == 0:
        files = {name: entry for part in entries for name, entry in part.items()}
        known = {"format": 1, "step": step, "files": files, "optimizer": facts, "tied": tied_names(state.module),
                 "state": state.file_format, "strategy": state.strategy, "world": state.world}  # fmt: skip
        folders.publish(folder, {**known, **manifest})
    if dist.is_initialized():
        dist.barrier()


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
