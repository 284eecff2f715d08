"""The header of a safetensors file: laid out before the data is there, and read without it. No torch.

The layout is the safetensors library's own (larger elements first, then by name), so a file written by it holds the
same bytes as one that `save_pretrained` writes of the same tensors. The library reads headers too, but only with numpy
or torch beside it, which take longer to import than a gigabyte to copy, and it does not say where a tensor's bytes lie.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint.tensor_index import ITEM_BYTES, Member, Span, TensorIndex
from toolkit.errors import UserError

_MOST_HEADER_BYTES = 100_000_000  # the library refuses longer ones, and so does every reader built on it
# The library's order of dtypes; where sizes are equal the later name comes first.
_ORDER = ("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a file to be written lies. The header's length does not depend on checksums."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Name -> (dtype, shape), in the file's order."""
    offsets: Mapping[str, int]
    """Name -> its first byte in the file."""
    size: int
    """Bytes of the whole file."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    with_checksums: bool = False

    def header(self, checksums: Mapping[str, int] | None = None) -> bytes:
        """The file's first bytes; always `min(offsets)` of them. `checksums`: CRC32 by tensor name."""
        metadata = dict(self.metadata)
        if self.with_checksums:
            digits = {name: f"{(checksums or {}).get(name, 0):08x}" for name in self.tensors}
            metadata["crc32"] = json.dumps(digits, ensure_ascii=False)
        table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        place = 0
        for name, (dtype, shape) in self.tensors.items():
            end = place + math.prod(shape) * ITEM_BYTES[dtype]
            table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
            place = end
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned to the largest element
        return struct.pack("<Q", len(text)) + text


def lay_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    checksums: bool = False,
) -> Layout:
    """Places tensors, name -> (dtype, shape), in a file. `checksums` leaves room for each tensor's CRC32.

    The order of `tensors` does not matter: the same tensors make the same file. Raises UserError for the one name
    that the format reserves.
    """
    if "__metadata__" in tensors:
        raise UserError("a tensor is named __metadata__, which a safetensors file cannot hold: rename it")
    ordered = dict(sorted(tensors.items(), key=lambda item: (-_ORDER.index(item[1][0]), item[0])))
    draft = Layout(ordered, {}, 0, dict(metadata or {}), checksums)
    place, offsets = len(draft.header()), {}
    for name, (dtype, shape) in ordered.items():
        offsets[name] = place
        place += math.prod(shape) * ITEM_BYTES[dtype]
    return replace(draft, offsets=offsets, size=place)


@dataclass(frozen=True)
class Header:
    """What the header of a safetensors file lists."""

    tensors: Mapping[str, TensorIndex]
    """By name, in the order of their bytes. Each lies in a member of its own."""
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """The tensors of a safetensors file, by structure only; CRC32s where its metadata holds them.

    Raises UserError, naming the file, when it is not one, is shorter or longer than its header says,
    holds an unknown dtype, or tensors that overlap or leave gaps.
    """
    try:
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if length > min(_MOST_HEADER_BYTES, size - 8):
                raise ValueError("it is truncated, or its first 8 bytes are not the length of a header")
            table = json.loads(file.read(length), object_pairs_hook=_without_repeats)
        return _header_of(path, table, 8 + length, size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        fault = str(error) if type(error) is ValueError else f"its header cannot be read ({error})"
        raise UserError(f"{path} is not a sound safetensors file: {fault[:300]}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _header_of(path: Path, table: dict[str, Any], data: int, size: int) -> Header:
    """`data`: the first byte after the header; `size`: bytes of the file. Raises ValueError and the like."""
    metadata = table.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not a table of texts")
    checksums = {name: int(digits, 16) for name, digits in json.loads(metadata.get("crc32", "{}")).items()}
    place, tensors = data, {}
    for start, end, name, dtype, shape in sorted(_entry(name, entry) for name, entry in table.items()):
        if data + start != place:
            raise ValueError(f"{name} begins at data byte {start}, where the tensor before it ends at {place - data}")
        member = Member(path, name, place, end - start, checksums.get(name))
        tensors[name] = TensorIndex(name, shape, dtype, (Span(member, 0, math.prod(shape)),))
        place = data + end
    if place != size:
        fault = "truncated" if place > size else "there is more behind its last tensor"
        raise ValueError(f"it has {size} bytes and its header describes {place}: {fault}")
    return Header(tensors, metadata)


def _entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """(first data byte, end, name, dtype, shape)."""
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, start, end] if isinstance(shape, list) and len(shape) <= 64 else [None]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"the shape or the offsets of {name} are not whole numbers, or too many")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} is of the unknown dtype {str(dtype)[:20]!r}; known: {', '.join(ITEM_BYTES)}")
    if math.prod(shape) * ITEM_BYTES[dtype] != end - start:
        raise ValueError(f"{name} of shape {shape} and dtype {dtype} does not fill data bytes {start} to {end}")
    return start, end, name, dtype, tuple(shape)
