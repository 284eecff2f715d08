"""What a checkpoint holds: named tensors whose elements lie in byte ranges of files. Imports no torch.

Everything that reads a checkpoint (resume, convert, inspect) works on a `CheckpointReader`, whoever wrote the
files. A tensor is a chain of spans, and never has to be held whole: who reads takes the elements it needs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.checksum import read_into
from toolkit.errors import UserError

# Bytes of one element, by the names safetensors uses.
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_FORMATS = {
    "F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "?",
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Member:
    """Bytes that are written, and checked, as one: a member of a zip file, a tensor of a safetensors file."""

    file: Path
    name: str
    """Within the file, for messages."""
    offset: int
    """Of its first byte in the file."""
    size: int
    """Bytes."""
    crc32: int | None = None
    """Of all its bytes, where the file holds one."""

    def check(self, found: int) -> None:
        """Raises UserError unless the CRC32 that was found is the one it was written with."""
        if self.crc32 not in (None, found):
            raise UserError(
                f"{self.file}: the bytes of {self.name} have the checksum {found:08x} and were written with "
                f"{self.crc32:08x}: damaged, copy the file again or take another checkpoint"
            )


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive elements of a tensor inside one member."""

    member: Member
    start: int
    """Bytes from the member's beginning."""
    count: int
    """Elements."""


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """A tensor: its spans, in row-major order, hold each element exactly once."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A key of `ITEM_BYTES`."""
    spans: tuple[Span, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * ITEM_BYTES[self.dtype]

    def number(self) -> int | float | bool | None:
        """What a tensor of one element holds: a few bytes are read. None for any other."""
        if self.count != 1:
            return None
        content, dtype = bytes(self.read()), self.dtype
        if dtype == "BF16":  # the upper half of a float32
            content, dtype = b"\0\0" + content, "F32"
        number: int | float | bool = struct.unpack(f"<{_FORMATS[dtype]}", content)[0]
        return number

    def cut(self, start: int, count: int) -> TensorIndex:
        """Its elements [start, start + count) in row-major order, fewer where there are no more."""
        item, spans = ITEM_BYTES[self.dtype], []
        for span in self.spans:
            first, end = max(start, 0), min(start + count, span.count)
            if first < end:
                spans.append(Span(span.member, span.start + first * item, end - first))
            start -= span.count
        return TensorIndex(self.name, (sum(span.count for span in spans),), self.dtype, tuple(spans))

    def read(self, start: int = 0, count: int | None = None) -> bytearray:
        """The bytes of elements [start, start + count), as stored. Raises UserError on a short file."""
        part = self.cut(start, self.count - start if count is None else count)
        content = bytearray(part.size)
        place, view = 0, memoryview(content)
        for span in part.spans:
            end = place + span.count * ITEM_BYTES[self.dtype]
            read_into(span.member.file, span.member.offset + span.start, view[place:end])
            place = end
        return content


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value of an optimizer's state."""

    value: Any
    """A number, bool, text or None; a tuple of them where each process has its own."""
    dtype: str = ""
    """Of the tensor it was, a key of `ITEM_BYTES`; empty where it was none."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReader:
    """An opened checkpoint. Opening has read the structure of every file and none of the data."""

    path: Path
    """As the user named it, for messages."""
    strategy: str = "single"
    """`single`, `ddp`, `zero1`, `zero2`, `zero3`, `fsdp2`, or `model` for weights without an optimizer."""
    world: int = 1
    """Processes that wrote it."""
    step: int | None = None
    """Optimizer steps taken, where the files say."""
    weights: Mapping[str, TensorIndex]
    """By parameter name: the fp32 masters of trained parameters, frozen ones as stored."""
    buffers: Mapping[str, TensorIndex] = field(default_factory=dict)
    """Persistent buffers."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Another name of a parameter -> the name in `weights`."""
    frozen: frozenset[str] = frozenset()
    """Names in `weights` that no optimizer owns."""
    excluded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Frozen parameters (with shapes) that the checkpoint leaves out, where it names them."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Its class, and what it has changed in its groups, where the manifest says: see `save.optimizer_facts`."""
    optimizer_state: Mapping[str, Mapping[str, TensorIndex]] = field(default_factory=dict)
    """Parameter name -> the optimizer's key -> what it keeps: of the parameter's shape (`exp_avg`,
    `momentum_buffer`) or of another (Adafactor's rows)."""
    optimizer_scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    """Parameter name -> the optimizer's key (`step`) -> what it keeps once for all elements."""
    engine_dtype: str = "F32"
    """What the model computed in: F32, BF16 or F16."""
    model_folder: Path | None = None
    """Holds config.json, the tokenizer, and adapter_config.json under LoRA, where the run has them."""
    details: Mapping[str, object] = field(default_factory=dict)
    """For `--inspect`: ds_version, groups, partition counts, ..."""

    def step_counts(self) -> dict[str, float]:
        """Parameter name -> the optimizer's own count of steps."""
        return {name: float(kept["step"].value) for name, kept in self.optimizer_scalars.items() if "step" in kept}


def joined(where: Path, name: str, shape: tuple[int, ...], parts: Iterable[tuple[int, TensorIndex]]) -> TensorIndex:
    """A tensor of its shards, (first element, shard) each. Raises UserError unless each element is there once.

    `where`: the folder, for messages.
    """
    spans: list[Span] = []
    dtypes, place = set(), 0
    for start, part in sorted(parts, key=lambda part: (part[0], part[1].count)):
        dtypes.add(part.dtype)
        if part.count:
            if start != place or len(dtypes) > 1:
                raise UserError(f"{part.spans[0].member.file}: its part of {name} does not fit those of the others")
            spans += part.spans
            place += part.count
    if place != math.prod(shape):
        raise UserError(
            f"the files in {where} hold {place:,} of the {math.prod(shape):,} elements of {name}: copy them again"
        )
    return TensorIndex(name, shape, next(iter(dtypes), "F32"), tuple(spans))
