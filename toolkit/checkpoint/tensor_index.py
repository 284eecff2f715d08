"""What a checkpoint holds: named tensors whose elements lie in byte ranges of files. Imports no torch.

Everything that reads a checkpoint (resume, convert, inspect) works on a `CheckpointReader`, whichever library wrote
the files. A tensor is a chain of spans and never has to be in memory as a whole: its elements are read as needed.
"""

from __future__ import annotations

import math
import os
import shlex
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from toolkit.checkpoint.checksums import crc32
from toolkit.errors import UserError

# Name of a dtype, as safetensors has it -> its format in `struct`; bf16 has none.
_FORMATS = {
    "F64": "d", "F32": "f", "F16": "e", "BF16": "H", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B",
    "BOOL": "?",
}  # fmt: skip
ITEM_BYTES = {dtype: struct.calcsize(f"={letter}") for dtype, letter in _FORMATS.items()}
"""Bytes of one element."""
FLOATS = ("F64", "F32", "F16", "BF16")


# bytes of files


def blocks(file: Path, start: int, size: int, block: int = 1 << 20) -> Iterator[memoryview]:
    """`size` bytes from `start` on, at most `block` at a time, each valid until the next one is read.

    Raises UserError where they cannot be read.
    """
    buffer = memoryview(bytearray(min(block, size)))
    try:
        with file.open("rb", buffering=0) as opened:
            for offset in range(start, start + size, block):
                view = buffer[: min(block, start + size - offset)]
                _fill(opened, file, offset, view)
                yield view
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def read_into(file: Path, start: int, view: memoryview) -> None:
    """Fills `view` from byte `start` on. Raises UserError where the file ends first, and OSError."""
    with file.open("rb", buffering=0) as opened:
        _fill(opened, file, start, view)


def _fill(opened: IO[bytes], file: Path, start: int, view: memoryview) -> None:
    while len(view):
        count = os.preadv(opened.fileno(), [view], start)
        if count == 0:
            raise UserError(f"{file} ends at byte {start} and should hold {start + len(view)}: truncated")
        view, start = view[count:], start + count


def crc32_of_range(file: Path, start: int = 0, size: int | None = None) -> int:
    """The checksum of `size` bytes from `start` on (to the file's end by default), in little memory."""
    value = 0
    for block in blocks(file, start, file.stat().st_size - start if size is None else size):
        value = crc32(block, value)
    return value


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

    def check(self, checksum: int) -> None:
        """Raises UserError unless the CRC32 of its bytes is the one in the file."""
        if self.crc32 not in (None, checksum):
            digits = f"(checksum {checksum:08x}, saved as {self.crc32:08x})"
            raise UserError(f"{self.file}: {self.name} is damaged {digits}: copy the file again or take another one")

    def verify(self) -> None:
        """Reads its bytes and compares their checksum, where the file holds one. Raises UserError."""
        if self.crc32 is not None:
            self.check(crc32_of_range(self.file, self.offset, self.size))


# tensors


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
        """The value of a tensor of one element; None for any other."""
        if self.count != 1:
            return None
        content, letter = bytes(self.read()), _FORMATS[self.dtype]
        if self.dtype == "BF16":  # the upper half of a float32
            content, letter = b"\0\0" + content, "f"
        value: int | float | bool = struct.unpack(f"<{letter}", content)[0]
        return value

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


def mixed_saves(one: Path, other: Path, what: str) -> UserError:
    """The error for two files that differ in what all files of a save have in common."""
    return UserError(f"{one} and {other} differ in {what}: they are of different saves; copy the checkpoint again")


def missing_files(folder: Path, fault: str) -> UserError:
    """The error for files of some processes that are missing in a folder."""
    path = shlex.quote(str(folder.resolve()))
    hint = f"where machines share no disk, from each of them: `rsync -a OTHER_MACHINE:{path}/ {path}/`"
    return UserError(f"{fault}: copy it again; {hint}")


def join_shards(
    folder: Path, name: str, shape: tuple[int, ...], shards: Iterable[tuple[int, TensorIndex]]
) -> TensorIndex:
    """A tensor of its shards, (first element, shard) each. Raises UserError unless each element is there once.

    `folder`: for messages.
    """
    spans: list[Span] = []
    dtypes, place = set(), 0
    for start, shard in sorted(shards, key=lambda shard: (shard[0], shard[1].count)):
        dtypes.add(shard.dtype)
        if shard.count:
            if start != place or len(dtypes) > 1:
                raise UserError(f"{shard.spans[0].member.file}: its shard of {name} does not fit those of the others")
            spans += shard.spans
            place += shard.count
    if place != math.prod(shape):
        raise UserError(f"{folder} holds {place:,} of the {math.prod(shape):,} elements of {name}: copy it again")
    return TensorIndex(name, shape, next(iter(dtypes), "F32"), tuple(spans))


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
    """Optimizer steps taken, where the files record it."""
    members: tuple[Member, ...] = ()
    """Of a run's checkpoint and of DeepSpeed's: all that the opened files hold."""
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
    """Its class, and what it has changed in its groups, where the manifest has it: see `save.optimizer_facts`."""
    optimizer_state: Mapping[str, Mapping[str, TensorIndex]] = field(default_factory=dict)
    """Parameter name -> the optimizer's key -> its state: of the parameter's shape (`exp_avg`, `momentum_buffer`) or
    of another (Adafactor's rows)."""
    optimizer_scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    """Parameter name -> the optimizer's key (`step`) -> its one value for all elements."""
    engine_dtype: str = "F32"
    """What the model computed in: F32, BF16 or F16."""
    model_folder: Path | None = None
    """Holds config.json, the tokenizer, and adapter_config.json under LoRA, where the run has them."""
    details: Mapping[str, object] = field(default_factory=dict)
    """For `--inspect`: ds_version, groups, partition counts, ..."""

    def tensors(self) -> Iterator[TensorIndex]:
        """All of them: weights, buffers and the optimizer's state."""
        yield from self.weights.values()
        yield from self.buffers.values()
        for state in self.optimizer_state.values():
            yield from state.values()

    def names(self) -> list[str]:
        """All names of parameters and buffers."""
        return [*self.weights, *self.buffers, *self.excluded, *self.tied]

    @property
    def has_lora(self) -> bool:
        """Whether the parameters are those of a model with a LoRA adapter."""
        return any(".lora_" in name for name in self.weights)

    def step_counts(self) -> dict[str, float]:
        """Parameter name -> the optimizer's own count of steps."""
        return {
            name: float(scalars["step"].value) for name, scalars in self.optimizer_scalars.items() if "step" in scalars
        }
