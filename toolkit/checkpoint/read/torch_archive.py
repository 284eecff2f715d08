"""Opens files of `torch.save`: their structure, and the byte range of each tensor. Reads no data, imports no torch.

They are uncompressed zip files; torch.distributed.checkpoint writes several into one file. Sizes and offsets are
checked against the file's size before they are used.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.unpickle import MAX_BYTES, MalformedError, Tensor, unpickle, walk
from toolkit.checkpoint.tensor_index import ITEM_BYTES, Member, Span, TensorIndex, crc32, read_into
from toolkit.errors import UserError
from toolkit.utils.files import refuse_lfs_pointer

_LOCAL, _END = b"PK\3\4", b"PK\5\6"


@dataclass(frozen=True)
class TorchArchive:
    """The content of a file, with a `Tensor` in place of each tensor."""

    file: Path
    content: Any
    members: Mapping[str, Member]
    """Members by name in the zip file: `ARCHIVE/data/KEY` is the storage KEY."""
    archive: str
    """The file's name when it was saved, without suffix; `archive` if torch got none."""

    def index(self, name: str, tensor: Any) -> TensorIndex:
        """The index of a tensor of this file. Raises UserError if it is not contiguous or its bytes are missing."""
        if type(tensor) is not Tensor:
            raise UserError(f"{self.file}: {name} is a {type(tensor).__name__} where a tensor should be")
        if not tensor.contiguous or tensor.bits:
            why = f"is stored with the bit {tensor.bits[:50]!r}" if tensor.bits else "is not contiguous"
            raise UserError(f"{self.file}: {name} {why}; save it again after .resolve_neg().contiguous()")
        member = self.members.get(f"{self.archive}/data/{tensor.storage.key}")
        if member is None:
            raise UserError(f"{self.file}: the bytes of {name} (data/{tensor.storage.key}) are missing: damaged")
        if member.size != tensor.storage.size:
            sizes = f"has {member.size:,} bytes and should have {tensor.storage.size:,}"
            raise UserError(f"{self.file}: {member.name} {sizes} for {name}: damaged")
        span = Span(member, tensor.offset * ITEM_BYTES[tensor.dtype], tensor.count)
        return TensorIndex(name, tensor.shape, tensor.dtype, (span,))

    def tensors(self, state: Mapping[Any, Any]) -> dict[str, Tensor]:
        """The tensors of a state dict. Raises UserError for one without a string as name, or in a container."""
        for name, value in state.items():
            if type(value) is Tensor and type(name) is not str:
                raise UserError(f"{self.file}: a tensor's name is {name!r}, not a string: save it under a string")
            if type(value) is not Tensor and any(type(each) is Tensor for each in walk([value])):
                kind, advice = type(value).__name__, "save each under a name"
                advice += f", or the dict alone: torch.save(...[{name!r}], FILE)" if kind == "dict" else ""
                raise UserError(f"{self.file}: {name} is a {kind} of tensors, next to others: {advice}")
        return {name: value for name, value in state.items() if type(value) is Tensor}

    def tied(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Other name -> first name of tensors with the same elements of the same storage."""
        first: dict[object, str] = {}
        tied = {}
        for name, tensor in tensors.items():
            if tensor.count:
                elements = (tensor.storage.key, tensor.offset, tensor.shape, tensor.stride, tensor.dtype)
                if first.setdefault(elements, name) != name:
                    tied[name] = first[elements]
        return tied


def open_torch_archive(file: Path, start: int = 0, size: int | None = None) -> TorchArchive:
    """Opens the file of torch.save that fills `size` bytes of `file` from `start` on.

    Raises UserError for files that are missing, truncated, damaged, of an old format, or would execute code.
    """
    members = zip_members(file, start, size)
    structures = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(structures) != 1:
        raise UserError(f"{file} is a zip file that torch.save did not write: it has no data.pkl")
    archive = structures[0].removesuffix("/data.pkl")
    order = members.get(f"{archive}/byteorder")
    if order is not None and read_member(order, 100) != b"little":
        raise UserError(f"{file} was written on a big-endian machine, which is not supported")
    content = unpickle(read_member(members[structures[0]], MAX_BYTES), file)
    return TorchArchive(file, content, members, archive)


def read_member(member: Member, max_bytes: int) -> bytes:
    """Reads a member and checks its CRC32. Raises UserError, also if it has more than `max_bytes`."""
    if member.size > max_bytes:
        raise UserError(f"{member.file}: {member.name} has {member.size:,} bytes, more than it can have: damaged?")
    content = bytearray(member.size)
    read_into(member.file, member.offset, memoryview(content))
    member.check(crc32(content))
    return bytes(content)


def zip_members(file: Path, start: int = 0, size: int | None = None) -> dict[str, Member]:
    """The members, by name, of the zip file that fills `size` bytes of `file` from `start` on. Raises UserError."""
    try:
        refuse_lfs_pointer(file)
        with _Range(file, start, size) as opened:
            if not opened.read_at(max(start, opened.end - 22), 22).startswith(_END):
                raise UserError(f"{file}: {_format_fault(opened.read_at(start, 4))}")
            with zipfile.ZipFile(opened) as archive:
                entries, directory = archive.infolist(), archive.start_dir
            # torch.serialization.set_crc32_options(False) leaves zeros
            with_checksums = any(entry.CRC for entry in entries)
            return {entry.filename: _member(file, opened, entry, directory, with_checksums) for entry in entries}
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (MalformedError, zipfile.BadZipFile, NotImplementedError, LookupError, ValueError, struct.error) as error:
        raise UserError(f"{file} is damaged: its zip structure has {error}; copy it again") from None


class _Range(io.FileIO):
    """A file that ends at the end of the range. zipfile itself finds the beginning of the zip file."""

    def __init__(self, file: Path, start: int, size: int | None) -> None:
        super().__init__(file)
        length = os.fstat(self.fileno()).st_size
        self.end = length if size is None else start + size
        if not 0 <= start <= self.end <= length:
            raise UserError(f"{file} has {length:,} bytes and should have {self.end:,}: truncated")

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return super().seek(self.end + offset) if whence == os.SEEK_END else super().seek(offset, whence)

    def read(self, count: int | None = -1) -> bytes:
        rest = max(0, self.end - self.tell())
        count = rest if count is None or count < 0 else min(count, rest)
        if count > MAX_BYTES:
            raise MalformedError(f"a directory of {count:,} bytes")
        return super().read(count)

    def read_at(self, offset: int, count: int) -> bytes:
        self.seek(offset)
        return self.read(count)


def _member(file: Path, opened: _Range, entry: zipfile.ZipInfo, directory: int, with_checksum: bool) -> Member:
    """`directory`: where the members end."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
        raise UserError(f"{file}: {entry.filename} is compressed: save it with torch.save, which does not compress")
    header = opened.read_at(entry.header_offset, 30)
    if not header.startswith(_LOCAL):
        raise MalformedError(f"no header before {entry.filename}")
    # the header ends with the lengths of the name and the extra field, which follow it
    start = entry.header_offset + 30 + sum(struct.unpack_from("<2H", header, 26))
    if start + entry.file_size > directory:
        raise MalformedError(f"{entry.filename} overlapping its directory")
    return Member(file, entry.filename, start, entry.file_size, entry.CRC if with_checksum else None)


def _format_fault(first: bytes) -> str:
    """Why a file with these first bytes has no end record."""
    if not first:
        return "the file is empty; copy it again or take another checkpoint"
    if first == _LOCAL:
        return "the end of the file is missing: truncated; copy it again or take another checkpoint"
    if first.startswith(b"\x80"):
        return "in torch's old format, which cannot be read without executing code; if you trust it, load and resave it"
    return "not a file of torch.save, or its beginning and end are damaged"
