"""Writes files that `torch.load` reads, without torch: the structure as a pickle, the tensors' bytes beside it.

The bytes of a large tensor are not held: `lay_out` says where in the file they go and which bytes stand around
them once their checksums are known. As torch does, members are stored uncompressed, those of tensors from a
multiple of 64 bytes on, and every size is written with 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.checkpoint.checksum import crc32
from toolkit.checkpoint.read.pickled_names import STORAGE_NAMES, Storage, Tensor
from toolkit.checkpoint.read.unpickle import Name, Thing

_ALIGNMENT = 64
_UTF8, _DATE = 0x0800, 0x0021  # the first day that zip files know
_WIDE = 0xFFFFFFFF  # the size stands in the 64-bit field


def new_tensor(key: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor that fills the storage `data/KEY`."""
    count, strides = 1, []
    for length in reversed(shape):
        strides.append(count)
        count *= max(length, 1)
    held = 0 if 0 in shape else count
    return Tensor(Storage(key, dtype, held), dtype, 0, shape, tuple(reversed(strides)))


def pickled(value: Any) -> bytes:
    """A pickle of what `unpickle` gives: its numbers, strings, containers, tensors, names and things.

    Raises TypeError for anything else.
    """
    out = bytearray(b"\x80\x02")
    _put(out, value)
    out += b"."
    return bytes(out)


def _put(out: bytearray, value: Any) -> None:
    put = _PUTTERS.get(type(value))
    if put is None:
        raise TypeError(f"a {type(value).__name__} has no place in a checkpoint")
    put(out, value)


def _put_int(out: bytearray, value: int) -> None:
    if -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
    else:
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes([len(content)]) + content


def _put_str(out: bytearray, value: str) -> None:
    content = value.encode("utf-8", "surrogatepass")
    out += b"X" + struct.pack("<I", len(content)) + content


def _put_all(out: bytearray, opening: bytes, values: Sequence[Any], closing: bytes) -> None:
    out += opening
    for value in values:
        _put(out, value)
    out += closing


def _put_dict(out: bytearray, value: Mapping[Any, Any]) -> None:
    _put_all(out, b"}(", [part for item in value.items() for part in item], b"u")


def _put_global(out: bytearray, path: str) -> None:
    module, _, name = path.rpartition(".")
    out += f"c{module}\n{name}\n".encode()


def _put_call(out: bytearray, path: str, *arguments: Any) -> None:
    _put_global(out, path)
    _put(out, arguments)
    out += b"R"


def _put_tensor(out: bytearray, tensor: Tensor) -> None:
    _put_global(out, "torch._utils._rebuild_tensor_v2")
    out += b"("
    identity = (
        "storage",
        Name(f"torch.{STORAGE_NAMES[tensor.dtype]}"),
        tensor.storage.key,
        "cpu",
        tensor.storage.count,
    )
    _put(out, identity)
    out += b"Q"
    for argument in (tensor.offset, tensor.shape, tensor.stride, False):
        _put(out, argument)
    _put_call(out, "collections.OrderedDict")
    out += b"tR"


def _put_thing(out: bytearray, thing: Thing) -> None:
    """An object of an allowed class: only what `unpickle` let in can come out again."""
    _put_global(out, thing.name)
    _put(out, thing.arguments)
    out += b"R" if thing.arguments else b"\x81"  # a class without arguments is not called, as Python itself does it
    if thing.state:
        _put(out, thing.state)
        out += b"b"


_PUTTERS: Mapping[type, Any] = {
    type(None): lambda out, value: out.extend(b"N"),
    bool: lambda out, value: out.extend(b"\x88" if value else b"\x89"),
    int: _put_int,
    float: lambda out, value: out.extend(b"G" + struct.pack(">d", value)),
    str: _put_str,
    bytes: lambda out, value: _put_call(out, "_codecs.encode", value.decode("latin1"), "latin1"),
    list: lambda out, value: _put_all(out, b"](", value, b"e"),
    tuple: lambda out, value: _put_all(out, b"(", value, b"t"),
    set: lambda out, value: _put_call(out, "__builtin__.set", list(value)),
    dict: _put_dict,
    Name: lambda out, value: _put_global(out, value.path),
    Tensor: _put_tensor,
    Thing: _put_thing,
}


@dataclass(frozen=True)
class _Member:
    name: bytes
    size: int
    start: int
    """Of its header."""
    content: bytes | None
    """None: the bytes of a tensor, which are written by others."""

    @property
    def padding(self) -> int:
        """Bytes of an extra field of the header, so that a tensor begins at the alignment."""
        least = self.start + 30 + len(self.name) + 20
        return -(least + 4) % _ALIGNMENT + 4 if self.content is None else 0

    @property
    def offset(self) -> int:
        """Of its first byte."""
        return self.start + 30 + len(self.name) + 20 + self.padding

    def header(self, crc: int) -> bytes:
        wide = struct.pack("<2H2Q", 1, 16, self.size, self.size)
        extra = wide + (
            struct.pack("<2s H", b"FB", self.padding - 4).ljust(self.padding, b"Z") if self.padding else b""
        )
        numbers = (45, _UTF8, 0, 0, _DATE, crc, _WIDE, _WIDE, len(self.name), len(extra))
        return struct.pack("<4s5H3L2H", b"PK\3\4", *numbers) + self.name + extra

    def entry(self, crc: int) -> bytes:
        """In the directory."""
        extra = struct.pack("<2H3Q", 1, 24, self.size, self.size, self.start)
        numbers = (45, 45, _UTF8, 0, 0, _DATE, crc, _WIDE, _WIDE, len(self.name), len(extra), 0, 0, 0, 0, _WIDE)
        return struct.pack("<4s6H3L5H2L", b"PK\1\2", *numbers) + self.name + extra


@dataclass(frozen=True)
class TorchLayout:
    """Where everything of a file lies."""

    _members: tuple[_Member, ...]
    data: tuple[int, ...]
    """Offset of the first byte of each storage `data/0`, `data/1`, ..."""
    data_end: int
    """Where the directory begins."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.data_end + sum(len(member.entry(0)) for member in self._members) + 56 + 20 + 22

    def around(self, checksums: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of all but the storages, whose CRC32s are `checksums`."""
        known, directory = iter(checksums), b""
        for member in self._members:
            crc = next(known) if member.content is None else crc32(member.content)
            yield member.start, member.header(crc) + (member.content or b"")
            directory += member.entry(crc)
        yield self.data_end, directory + self._end(len(directory))

    def _end(self, size: int) -> bytes:
        count, where = len(self._members), self.data_end + size
        record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, self.data_end)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, where, 1)
        return record + locator + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, _WIDE, _WIDE, 0)


def lay_out(stem: str, value: Any, sizes: Sequence[int]) -> TorchLayout:
    """A file of `value`, whose tensors lie in storages `0`, `1`, ... of `sizes` bytes. `stem`: of the file's name."""
    contents: list[tuple[str, bytes | None, int]] = []
    for name, content in (("data.pkl", pickled(value)), ("byteorder", b"little"), ("version", b"3\n")):
        contents.append((name, content, len(content)))
    contents += [(f"data/{number}", None, size) for number, size in enumerate(sizes)]
    members, place = [], 0
    for name, held, size in contents:
        members.append(_Member(f"{stem}/{name}".encode(), size, place, held))
        place = members[-1].offset + size
    return TorchLayout(tuple(members), tuple(member.offset for member in members if member.content is None), place)
