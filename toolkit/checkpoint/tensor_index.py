"""The index of a checkpoint: named tensors, and the byte ranges of files that hold their elements. Imports no torch.

Resume, convert and inspect all work on a `CheckpointReader`, whichever library wrote the files. A tensor is a list of
spans; its elements are read as needed, so it never has to fit in memory.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from toolkit.errors import UserError, listing

T = TypeVar("T")

_CRC32_POLYNOMIAL = 0xEDB88320  # bit 31 is the lowest power, and x^32 is left out

# safetensors' dtype -> (its format in `struct`, which lacks bf16; torch's name; that of torch's storage)
DTYPES = {
    "F64": ("d", "float64", "Double"), "F32": ("f", "float32", "Float"), "F16": ("e", "float16", "Half"),
    "BF16": ("H", "bfloat16", "BFloat16"), "I64": ("q", "int64", "Long"), "I32": ("i", "int32", "Int"),
    "I16": ("h", "int16", "Short"), "I8": ("b", "int8", "Char"), "U8": ("B", "uint8", "Byte"),
    "BOOL": ("?", "bool", "Bool"),
}  # fmt: skip
ITEM_BYTES = {dtype: struct.calcsize(f"={letter}") for dtype, (letter, _, _) in DTYPES.items()}
"""Bytes of one element."""
FLOATS = ("F64", "F32", "F16", "BF16")


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo CRC32's."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (_CRC32_POLYNOMIAL if b & 1 else 0)
    return product


def combine(first: int, second: int, size: int) -> int:
    """The CRC32 of two concatenated byte strings from theirs; the second has `size` bytes. As zlib's crc32_combine:
    first * x^(8 size) + second."""
    power = 1 << 23  # x^8
    while size:
        first = _multiply(power, first) if size & 1 else first
        power, size = _multiply(power, power), size >> 1
    return first ^ second


try:
    from isal.isal_zlib import crc32, crc32_combine  # 30 GB/s; the extra `fast`
except ImportError:
    crc32, crc32_combine = zlib.crc32, combine  # 1 to 3 GB/s


def blocks(file: Path, start: int, size: int, block: int = 1 << 20) -> Iterator[memoryview]:
    """Reads `size` bytes from `start` on, at most `block` at a time into one buffer. Raises UserError."""
    buffer = memoryview(bytearray(min(block, size)))
    try:
        with file.open("rb", buffering=0) as opened:
            for offset in range(start, start + size, block):
                view = buffer[: min(block, start + size - offset)]
                _read_exactly(opened, file, offset, view)
                yield view
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def read_into(file: Path, start: int, view: memoryview) -> None:
    """Fills `view` with the file's bytes from `start` on. Raises OSError, and UserError if the file is too short."""
    with file.open("rb", buffering=0) as opened:
        _read_exactly(opened, file, start, view)


def _read_exactly(opened: IO[bytes], file: Path, start: int, view: memoryview) -> None:
    while len(view):
        count = os.preadv(opened.fileno(), [view], start)
        if count == 0:
            raise UserError(f"{file} ends at byte {start} and should have {start + len(view)} bytes: truncated")
        view, start = view[count:], start + count


def crc32_of_range(file: Path, start: int = 0, size: int | None = None, value: int = 0) -> int:
    """The CRC32 of `size` bytes from `start` on, by default to the end of the file. `value`: of the bytes before."""
    for block in blocks(file, start, file.stat().st_size - start if size is None else size):
        value = crc32(block, value)
    return value


def model_checksum(folder: Path, suffixes: tuple[str, ...] = (".safetensors", ".bin")) -> str:
    """Checksum of a model's config and weights: the files with these suffixes."""
    files = sorted(path for path in folder.iterdir() if path.name == "config.json" or path.suffix in suffixes)
    text = " ".join(f"{path.name} {crc32_of_range(path):08x}" for path in files)
    return f"{crc32(text.encode()):08x}"


@dataclass(frozen=True, slots=True)
class Member:
    """Bytes with one checksum: a member of a zip file, or a tensor of a safetensors file."""

    file: Path
    name: str
    """Name within the file, for messages."""
    offset: int
    """Position of its first byte in the file."""
    size: int
    """Bytes."""
    crc32: int | None = None
    """The checksum in the file; None if there is none."""

    def check(self, checksum: int) -> None:
        """Raises UserError if the file has another CRC32."""
        if self.crc32 not in (None, checksum):
            digits = f"(checksum {checksum:08x}, saved as {self.crc32:08x})"
            raise UserError(f"{self.file}: {self.name} is damaged {digits}: copy the file again or take another one")

    def verify(self) -> None:
        """Reads its bytes and checks their CRC32. Raises UserError."""
        if self.crc32 is not None:
            self.check(crc32_of_range(self.file, self.offset, self.size))


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
    """A tensor; its spans hold each element once, in row-major order."""

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
        """The value of a tensor with one element; None for any other."""
        if self.count != 1:
            return None
        content, letter = bytes(self.read()), DTYPES[self.dtype][0]
        if self.dtype == "BF16":  # the upper half of a float32
            content, letter = b"\0\0" + content, "f"
        value: int | float | bool = struct.unpack(f"<{letter}", content)[0]
        return value

    def cut(self, start: int, count: int) -> TensorIndex:
        """A tensor (n,) of elements [start, start + count), as far as there are any."""
        item, spans = ITEM_BYTES[self.dtype], []
        for span in self.spans:
            first, end = max(start, 0), min(start + count, span.count)
            if first < end:
                spans.append(Span(span.member, span.start + first * item, end - first))
            start -= span.count
        return TensorIndex(self.name, (sum(span.count for span in spans),), self.dtype, tuple(spans))

    def read(self, start: int = 0, count: int | None = None) -> bytearray:
        """The stored bytes of elements [start, start + count). Raises UserError if a file is too short."""
        part = self.cut(start, self.count - start if count is None else count)
        content = bytearray(part.size)
        offset, view = 0, memoryview(content)
        for span in part.spans:
            end = offset + span.count * ITEM_BYTES[self.dtype]
            read_into(span.member.file, span.member.offset + span.start, view[offset:end])
            offset = end
        return content


def mixed_saves(one: Path, other: Path, what: str) -> UserError:
    """The error for two files of different saves. `what`: the value in which they differ."""
    return UserError(f"{one} and {other} differ in {what}: they are of different saves; copy the checkpoint again")


def missing_files(folder: Path, fault: str) -> UserError:
    """The error for missing files of some ranks."""
    path = shlex.quote(str(folder.resolve()))
    hint = f"where machines share no disk, from each of them: `rsync -a OTHER_MACHINE:{path}/ {path}/`"
    return UserError(f"{fault}: copy it again; {hint}")


def join_shards(
    folder: Path, name: str, shape: tuple[int, ...], shards: Iterable[tuple[int, TensorIndex]]
) -> TensorIndex:
    """Joins shards, (first element, shard) each. Raises UserError unless each element is there once."""
    spans: list[Span] = []
    dtypes, count = set(), 0
    for start, shard in sorted(shards, key=lambda shard: (shard[0], shard[1].count)):
        dtypes.add(shard.dtype)
        if shard.count:
            if start != count or len(dtypes) > 1:
                raise UserError(f"{shard.spans[0].member.file}: its shard of {name} does not fit the other files")
            spans += shard.spans
            count += shard.count
    if count != math.prod(shape):
        raise UserError(f"{folder} has {count:,} of the {math.prod(shape):,} elements of {name}: copy it again")
    return TensorIndex(name, shape, next(iter(dtypes), "F32"), tuple(spans))


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value of an optimizer's state."""

    value: Any
    """A number, bool, string or None; a tuple of them, by rank, if they differ."""
    dtype: str = ""
    """A key of `ITEM_BYTES` if it was a tensor; else empty."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReader:
    """An opened checkpoint: its files' structure has been read, none of their data."""

    path: Path
    """The path as the user passed it, for messages."""
    strategy: str = "single"
    """`single`, `ddp`, `zero1`, `zero2`, `zero3`, `fsdp2`, or `model` for weights without an optimizer."""
    world: int = 1
    """Processes that wrote it."""
    step: int | None = None
    """Optimizer steps taken, if the files record it."""
    members: tuple[Member, ...] = ()
    """All members of the files; only of a run's and DeepSpeed's checkpoints."""
    weights: Mapping[str, TensorIndex]
    """Parameters and persistent buffers by name: of trained parameters the fp32 masters, the others as stored."""
    buffers: frozenset[str] = frozenset()
    """Names in `weights` of buffers, if the files distinguish them."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Another name of a parameter -> the name in `weights`."""
    frozen: frozenset[str] = frozenset()
    """Names in `weights` of parameters that are not trained."""
    excluded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Frozen parameters (with shapes) that the checkpoint omits, if it names them."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """`save.optimizer_facts`, if the manifest has them."""
    optimizer_state: Mapping[str, Mapping[str, TensorIndex]] = field(default_factory=dict)
    """Parameter name -> the optimizer's key -> a tensor of the parameter's shape (`exp_avg`, `momentum_buffer`) or of
    another (Adafactor's rows)."""
    optimizer_scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    """Parameter name -> the optimizer's key (`step`) -> one value for all elements."""
    engine_dtype: str = "F32"
    """What the model computed in: F32, BF16 or F16."""
    model_folder: Path | None = None
    """Has config.json, the tokenizer, and adapter_config.json under LoRA, if the run has them."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For `--inspect`: ds_version, groups, partition counts, ..."""

    def tensors(self) -> Iterator[TensorIndex]:
        """Weights and optimizer state."""
        yield from self.weights.values()
        for state in self.optimizer_state.values():
            yield from state.values()

    def names(self) -> list[str]:
        """Names of all parameters and buffers."""
        return [*self.weights, *self.excluded, *self.tied]

    def renamed(self, names: Mapping[str, str]) -> CheckpointReader:
        """Renames the tensors; omits those that `names` lacks. Raises UserError for two tensors of one name."""
        weights, excluded, tied = dict(self.weights), dict(self.excluded), dict(self.tied)
        for other, name in self.tied.items():
            if other in names and name not in names:  # only the other name of a tied weight is selected
                table: dict[str, Any] = weights if name in weights else excluded
                table[other] = table[tied.pop(other)]
        counts = Counter(names[name] for name in (*weights, *excluded) if name in names)
        if repeated := sorted(name for name, count in counts.items() if count > 1):
            raise UserError(f"{self.path} has several tensors of one name: {listing(repeated)}")

        def rename(table: Mapping[str, T]) -> dict[str, T]:
            return {names[name]: value for name, value in table.items() if name in names}

        return dataclasses.replace(
            self,
            weights=rename(weights),
            buffers=frozenset(rename(dict.fromkeys(self.buffers))),
            tied={other: names[name] for other, name in rename(tied).items() if name in names},
            frozen=frozenset(rename(dict.fromkeys(self.frozen))),
            excluded=rename(excluded),
            optimizer_state=rename(self.optimizer_state),
            optimizer_scalars=rename(self.optimizer_scalars),
        )

    @property
    def has_lora(self) -> bool:
        return any(".lora_" in name for name in self.weights)

    def step_counts(self) -> dict[str, float]:
        """Parameter name -> the optimizer's step count."""
        counts = {name: scalars.get("step") for name, scalars in self.optimizer_scalars.items()}
        return {name: float(count.value) for name, count in counts.items() if count}
