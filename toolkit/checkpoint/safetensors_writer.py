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
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def write_safetensors(
    path: Path,
    shapes: Shapes,
    tensors: Iterable[Sequence[torch.Tensor]],
) -> str:
    """Creates the file, flushes it to the disk, and returns its XXH3 (128 bits) as hexadecimal
    digits.

    `tensors`: in the order of `file_order(shapes)`, each as one or more pieces of consecutive
    elements. Raises FileExistsError; UserError for a dtype that the format does not have;
    ValueError for a tensor that is not the one in `shapes`. An error leaves an unfinished file,
    which the caller removes."""
    digest = xxhash.xxh3_128()
    with path.open("xb") as file:
        for content in _contents(shapes, tensors):
            digest.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_in_dtype(
    path: Path,
    shapes: Shapes,
    dtype: torch.dtype,
    read: Callable[[str], Iterable[torch.Tensor]],
) -> None:
    """As `write_safetensors`, floating tensors in `dtype`. `read`: returns the pieces of a tensor.
    Raises UserError if a number becomes infinite."""
    in_file = {}
    for name, (own, shape) in shapes.items():
        in_file[name] = (dtype if own.is_floating_point else own, shape)
    tensors = (
        [cast(name, piece, dtype) for piece in read(name)] for name in file_order(in_file)
    )
    write_safetensors(path, in_file, tensors)


def _contents(
    shapes: Shapes,
    tensors: Iterable[Sequence[torch.Tensor]],
) -> Iterator[bytes | memoryview]:
    names = file_order(shapes)
    yield _header(names, shapes)
    for name, pieces in zip(names, tensors, strict=True):
        dtype, shape = shapes[name]
        is_whole = sum(piece.numel() for piece in pieces) == math.prod(shape)
        if not is_whole or any(piece.dtype != dtype for piece in pieces):
            raise ValueError(
                f"expected {name} in {dtype} of shape {list(shape)}, got {pieces}"
            )
        for piece in pieces:
            yield tensor_bytes(piece)


def file_order(shapes: Shapes) -> list[str]:
    """The names in the order in which a file holds them, larger elements first, which aligns each
    tensor; the same on every rank that knows the same shapes."""
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
            raise UserError(
                f"{name} has the dtype {dtype}, which safetensors files cannot hold"
            )
        start = end
        end += math.prod(shape) * dtype.itemsize
        offsets = [start, end]
        table[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text
