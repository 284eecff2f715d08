"""The header of a safetensors file: laid out before the data is there, and read without it. No torch.

The layout is the safetensors library's own (larger elements first, then by name), so a file written by
it holds the same bytes as one that `save_pretrained` writes of the same tensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from toolkit.checkpoint.reader import ITEM_BYTES, Member, Span, TensorIndex
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


@dataclass(frozen=True)
class Header:
    """What a safetensors file says it holds."""

    tensors: Mapping[str, TensorIndex]
    """By name, in the order of their bytes. Each lies in a member of its own."""
    metadata: Mapping[str, str]


def lay_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    checksums: bool = False,
) -> Layout:
    """Places tensors, name -> (dtype, shape), in a file. `checksums` leaves room for each tensor's CRC32.

    The order of `tensors` does not matter: the same tensors make the same file. Raises UserError for the one name
    that the format keeps for itself.
    """
    if "__metadata__" in tensors:
        raise UserError("a tensor is named __metadata__, which a safetensors file cannot hold: name it otherwise")
    ordered = dict(sorted(tensors.items(), key=lambda item: (-_ORDER.index(item[1][0]), item[0])))
    draft = Layout(ordered, {}, 0, dict(metadata or {}), checksums)
    place, offsets = len(draft.header()), {}
    for name, (dtype, shape) in ordered.items():
        offsets[name] = place
        place += math.prod(shape) * ITEM_BYTES[dtype]
    return replace(draft, offsets=offsets, size=place)


def read_header(path: Path) -> Header:
    """The tensors of a safetensors file, by structure only; CRC32s where its metadata holds them.

    Raises UserError, naming the file, when it is not one, is shorter or longer than its header says,
    holds an unknown dtype, or tensors that overlap or leave gaps.
    """
    table, place, size = _read_table(path)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "its __metadata__ is not a table of texts")
    try:
        checksums = {name: int(digits, 16) for name, digits in json.loads(metadata.get("crc32", "{}")).items()}
    except (ValueError, AttributeError, TypeError, RecursionError):
        _refuse(path, "the checksums in its header cannot be read")
    begin, tensors = place, {}
    for start, end, name, dtype, shape in sorted(_entry(path, name, entry) for name, entry in table.items()):
        if begin + start != place:
            _refuse(path, f"{name} begins at data byte {start}, where the tensor before it ends at {place - begin}")
        member = Member(path, name, place, end - start, checksums.get(name))
        tensors[name] = TensorIndex(name, shape, dtype, (Span(member, 0, math.prod(shape)),))
        place = begin + end
    if place != size:
        what = "truncated" if place > size else "there is more behind its last tensor"
        _refuse(path, f"it has {size} bytes and its header describes {place}: {what}")
    return Header(tensors, metadata)


def _read_table(path: Path) -> tuple[dict[str, Any], int, int]:
    """(the header's table, the data's first byte, the file's size in bytes)."""
    try:
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if length > min(_MOST_HEADER_BYTES, size - 8):
                _refuse(path, "it is truncated, or its first 8 bytes are not the length of a header")
            table = json.loads(file.read(length), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header is not JSON ({error})")
    if not isinstance(table, dict):
        _refuse(path, "its header is not a table")
    return table, 8 + length, size


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """(first data byte, end, name, dtype, shape)."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        _refuse(path, f"the entry of {name} lacks dtype, shape or data_offsets")
    numbers = [*shape, start, end] if isinstance(shape, list) and len(shape) <= 64 else [None]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        _refuse(path, f"the shape or the offsets of {name} are not whole numbers, or too many")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _refuse(path, f"{name} is of the unknown dtype {str(dtype)[:20]!r}; known: {', '.join(ITEM_BYTES)}")
    if math.prod(shape) * ITEM_BYTES[dtype] != end - start:
        _refuse(path, f"{name} of shape {shape} and dtype {dtype} does not fill data bytes {start} to {end}")
    return start, end, name, dtype, tuple(shape)


def _refuse(path: Path, why: str) -> NoReturn:
    raise UserError(f"{path} is not a sound safetensors file: {why}")
