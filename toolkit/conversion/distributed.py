"""Folders of torch.distributed.checkpoint: FSDP's sharded state, and any other.

`.metadata` is a pickle that lists the chunks of each tensor; a chunk is a small file of torch.save
within one of the `__RANK_N.distcp` files. Only the classes of that list are unpickled, and in
Python: the faster unpickler in C allocates as much as a damaged byte says.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from toolkit.conversion.stored import Checkpoint, Stored, model_states
from toolkit.conversion.torch_files import unpickle
from toolkit.errors import UserError, first_line, listing

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


class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "PosixPath":  # its module depends on the version of Python
            return Path
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _CLASSES:
            raise pickle.UnpicklingError(f"it needs {module}.{name}: nothing was executed")
        return super().find_class(module, name)


def open_distributed(path: Path, folder: Path) -> Checkpoint:
    """`path`: as the user named it. Raises UserError if a file is missing or damaged, or would
    execute code."""
    listed = _read_metadata(folder / ".metadata")
    files = {info.relative_path for info in listed.storage_data.values()}
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        raise UserError(f"{folder} lacks {listing(missing)}: copy it again, from each machine")
    places = {}
    for name, entry in listed.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            keys = (listed.planner_data or {}).get(name) or (name,)
            places[keys] = _stored(folder, name, entry, listed.storage_data)
    tensors = model_states(places, _is_weight)
    if not tensors:
        raise UserError(f"{folder}/.metadata lists no tensors of a model")
    return Checkpoint(path, tensors)


def _is_weight(tensor: Stored) -> bool:
    return tensor.dtype.is_floating_point and bool(tensor.shape)


def _read_metadata(path: Path) -> metadata.Metadata:
    try:
        with path.open("rb") as file:
            listed: metadata.Metadata = _Unpickler(file).load()
        listed.storage_data.values()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; copy the folder again") from None
    except Exception as error:
        raise UserError(f"{path} is damaged: {first_line(error)}; copy it again") from None
    return listed


def _stored(
    folder: Path, name: str, entry: metadata.TensorStorageMetadata, chunks: Any
) -> Stored:  # fmt: skip
    """Raises UserError if a tensor's chunks do not fill its shape."""
    if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
        raise UserError(f"{folder}: the chunks of {name} do not fill its shape {list(entry.size)}")

    def read() -> list[torch.Tensor]:
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            info = chunks[metadata.MetadataIndex(name, chunk.offsets)]
            part = tensor
            for axis, start in enumerate(chunk.offsets):
                part = part.narrow(axis, start, chunk.sizes[axis])
            part.copy_(_read_chunk(folder / info.relative_path, info, chunk.sizes))
        return [tensor]

    return Stored(tuple(entry.size), entry.properties.dtype, read)


def _read_chunk(path: Path, info: Any, shape: torch.Size) -> torch.Tensor:
    """Raises UserError if its checksum is wrong, or it is no tensor of this shape."""
    with path.open("rb") as file:
        file.seek(info.offset)
        content = io.BytesIO(file.read(info.length))
    try:
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
