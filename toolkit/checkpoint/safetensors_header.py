"""Writes and reads the header of a safetensors file, without its data. Imports no torch.

The layout is the safetensors library's (larger elements first, then by name): the same tensors make the same bytes as
`save_pretrained` writes. The library itself does not tell where a tensor's bytes are, and needs numpy or torch, whose
import takes longer than to copy a gigabyte.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.tensor_index import ITEM_BYTES, Member, Span, TensorIndex
from toolkit.errors import UserError
from toolkit.utils.files import refuse_lfs_pointer

_MAX_HEADER_BYTES = 100_000_000  # the library's limit
# The library's order of dtypes: files begin with the last.
_ORDER = ("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")


class Layout:
    """The layout of a file to write. The header's length does not depend on the checksums' values."""

    def __init__(
        self, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], checksums: bool = False
    ) -> None:
        """`tensors`: name -> (dtype, shape); their order does not matter. `checksums`: with each tensor's CRC32. Raises
        UserError for a reserved name."""
        if "__metadata__" in tensors:
            raise UserError("a tensor is named __metadata__, which safetensors reserves: rename it")
        self._metadata, self._with_checksums = metadata, checksums
        self._entries, end = dict[str, Any](), 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-_ORDER.index(item[1][0]), item[0])):
            start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        data = len(self.header())
        self.offsets = {name: data + entry["data_offsets"][0] for name, entry in self._entries.items()}
        """Name -> its first byte in the file, in the file's order."""
        self.size = data + end
        """Bytes of the file."""

    def header(self, checksums: Mapping[str, int] | None = None) -> bytes:
        """The file's bytes before the first tensor. `checksums`: CRC32 by tensor name."""
        metadata = dict(self._metadata)
        if self._with_checksums:
            digits = {name: f"{(checksums or {}).get(name, 0):08x}" for name in self._entries}
            metadata["crc32"] = json.dumps(digits, ensure_ascii=False)
        table = {"__metadata__": metadata, **self._entries} if metadata else self._entries
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the data to the largest element
        return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> tuple[dict[str, TensorIndex], dict[str, str]]:
    """(the tensors of a safetensors file by name, in the order of their bytes; its metadata). Each tensor has one
    member, with its CRC32 if the metadata has them.

    Raises UserError for a file that is invalid, truncated or too long, has an unknown dtype, overlaps or gaps.
    """
    try:
        refuse_lfs_pointer(path)
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError("it is truncated, or its first 8 bytes are not the length of a header")
            table = json.loads(file.read(length), object_pairs_hook=_without_repeats)
        return _parse_header(path, table, 8 + length, size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        fault = str(error) if type(error) is ValueError else f"its header cannot be read ({error})"
        raise UserError(f"{path} is not a valid safetensors file: {fault[:300]}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _parse_header(
    path: Path, table: dict[str, Any], data: int, size: int
) -> tuple[dict[str, TensorIndex], dict[str, str]]:
    """`data`: the first byte after the header; `size`: bytes of the file. Raises what `read_header` catches."""
    metadata = table.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("a value of its __metadata__ is not a string")
    checksums = {name: int(digits, 16) for name, digits in json.loads(metadata.get("crc32", "{}")).items()}
    offset, tensors = data, {}
    for start, end, name, dtype, shape in sorted(_parse_entry(name, entry) for name, entry in table.items()):
        if data + start != offset:
            raise ValueError(f"{name} begins at data byte {start}, where the tensor before it ends at {offset - data}")
        member = Member(path, name, offset, end - start, checksums.get(name))
        tensors[name] = TensorIndex(name, shape, dtype, (Span(member, 0, math.prod(shape)),))
        offset = data + end
    if offset != size:
        fault = "truncated" if offset > size else "extra bytes after its last tensor"
        raise ValueError(f"it has {size} bytes and its header describes {offset}: {fault}")
    return tensors, metadata


def _parse_entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """(first data byte, end, name, dtype, shape). Raises ValueError."""
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, start, end] if isinstance(shape, list) and len(shape) <= 64 else [None]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"the shape or the offsets of {name} are not integers, or too many")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has the unknown dtype {str(dtype)[:20]!r}; known: {', '.join(ITEM_BYTES)}")
    if math.prod(shape) * ITEM_BYTES[dtype] != end - start:
        raise ValueError(f"{name} of shape {shape} and dtype {dtype} does not fill data bytes {start} to {end}")
    return start, end, name, dtype, tuple(shape)
