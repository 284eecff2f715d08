"""Folders of torch.distributed.checkpoint: FSDP's sharded state, and any other.

`.metadata` is a pickle that lists the chunks of each tensor; a chunk is a small file of torch.save
within one of the `__RANK_N.distcp` files. Only the classes of that list are unpickled.
"""

from __future__ import annotations

import functools
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from toolkit.conversion.stored import Checkpoint, Stored, model_states
from toolkit.conversion.torch_files import unpickle
from toolkit.errors import UserError, first_line

_CLASSES = {
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "PosixPath":  # its module depends on the version of Python
            return Path
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _CLASSES:
            raise pickle.UnpicklingError(f"it needs {module}.{name}: nothing was executed")
        return super().find_class(module, name)


def open_distributed(path: Path, folder: Path) -> Checkpoint:
    """`path`: as the user named it. Raises UserError if its list of tensors is damaged, or would
    execute code."""
    list_file = folder / ".metadata"
    try:
        with list_file.open("rb") as file:
            places = _stored_tensors(folder, _Unpickler(file).load())
    except Exception as error:
        fault = first_line(error)
        raise UserError(f"{list_file} is damaged: {fault}; copy it again") from None
    tensors = model_states(places)
    if not tensors:
        raise UserError(f"{list_file} lists no tensors of a model")
    return Checkpoint(path, tensors)


def _stored_tensors(
    folder: Path, listed: metadata.Metadata
) -> dict[tuple[Any, ...], Stored]:
    """By their keys in nested dicts. Raises an error if the list is damaged."""
    places = {}
    for name, entry in listed.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            continue
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ValueError(
                f"the chunks of {name} do not fill its shape {list(entry.size)}"
            )
        chunks = []
        for chunk in entry.chunks:
            info = listed.storage_data[metadata.MetadataIndex(name, chunk.offsets)]
            chunks.append((chunk, info))
        read = functools.partial(_read, folder, entry, chunks)
        keys = (listed.planner_data or {}).get(name) or (name,)
        places[keys] = Stored(tuple(entry.size), entry.properties.dtype, read)
    return places


def _read(folder: Path, entry: Any, chunks: Any) -> list[torch.Tensor]:
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk, info in chunks:
        part = tensor
        for axis, start in enumerate(chunk.offsets):
            part = part.narrow(axis, start, chunk.sizes[axis])
        part.copy_(_read_chunk(folder / info.relative_path, info, chunk.sizes))
    return [tensor]


def _read_chunk(path: Path, info: Any, shape: torch.Size) -> torch.Tensor:
    """Raises UserError if its checksum is wrong, or it is no tensor of this shape."""
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            content = io.BytesIO(file.read(info.length))
        with zipfile.ZipFile(content) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        content.seek(0)
        chunk = unpickle(content).detach()
        if chunk.shape != shape:
            raise ValueError(f"its shape is {list(chunk.shape)}, not {list(shape)}")
    except Exception as error:
        fault = f"damaged at byte {info.offset:,}: {first_line(error)}"
        raise UserError(f"{path} is {fault}; copy it again") from None
    return chunk
