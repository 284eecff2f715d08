"""Writes a safetensors file one tensor at a time, so that no two of them need to be in memory
together.

The header of the format (https://github.com/huggingface/safetensors#format) holds names, dtypes and
shapes alone: it is written first, and each tensor's bytes follow as they come. The library's own
`save_file` needs all tensors at once."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch
import xxhash

from toolkit.errors import UserError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's name of each dtype that a checkpoint may hold."""

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What weights may be saved in, by the names of the settings."""

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name -> dtype and shape of a tensor to write."""


class SafetensorsWriter:
    """Use it as a context manager: `with SafetensorsWriter(path, shapes) as file`, then
    `file.write(name, tensor)` for each of `file.names`, in that order. An error in the block leaves
    an unfinished file, which its caller removes."""

    def __init__(self, path: Path, shapes: Shapes) -> None:
        """Creates the file and writes its header. Raises FileExistsError, and UserError for a dtype
        that the format does not have."""
        self.names = file_order(shapes)
        """The tensors' names in the order of the file: larger elements first, which aligns each
        tensor."""
        self.digest = ""
        """XXH3 (128 bits) of the whole file as hexadecimal digits, once the block has ended."""
        self._shapes = shapes
        self._written = 0  # tensors
        self._hash = xxhash.xxh3_128()
        header = _header(self.names, shapes)
        self._file = path.open("xb")
        self._append(header)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def write(self, name: str, *pieces: torch.Tensor) -> None:
        """Appends the next tensor, whole or in pieces of consecutive elements. Raises ValueError if
        it is not the one that the header announces."""
        expected = self.names[self._written]
        dtype, shape = self._shapes[expected]
        if name != expected or sum(piece.numel() for piece in pieces) != math.prod(shape):
            raise ValueError(f"expected {expected} of shape {list(shape)}, got {name}")
        for piece in pieces:
            if piece.dtype != dtype:
                raise ValueError(f"expected {name} in {dtype}, got {piece.dtype}")
            self._append(tensor_bytes(piece))
        self._written += 1

    def _append(self, content: bytes | memoryview) -> None:
        self._hash.update(content)
        self._file.write(content)

    def _finish(self) -> None:
        if self._written < len(self.names):
            raise ValueError(f"{self.names[self._written]} was not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.digest = self._hash.hexdigest()


def file_order(shapes: Shapes) -> list[str]:
    """The names in the order in which a file holds them; the same on every rank that knows the same
    shapes."""
    return sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype` if it is floating. Raises UserError if a number becomes infinite."""
    if not tensor.is_floating_point():
        return tensor
    changed = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(changed.isinf(), tensor.isinf()):
        raise UserError(f"{name} has a number that is infinite in fp16: use bf16")
    return changed


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes; without a copy if it is contiguous and in host memory."""
    content: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(content)


def _header(names: list[str], shapes: Shapes) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = shapes[name]
        if dtype not in DTYPE_NAMES:
            raise UserError(f"{name} has the dtype {dtype}, which safetensors files cannot hold")
        start = end
        end += math.prod(shape) * dtype.itemsize
        offsets = [start, end]
        table[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text
