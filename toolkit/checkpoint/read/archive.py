"""The zip files that `torch.save` writes: where each member's bytes lie. Reads no data and imports no torch.

Nothing that a file says about itself is believed before it is compared with the file's size. A zip file may
also be a range of a larger file, as torch.distributed.checkpoint writes them.
"""

from __future__ import annotations

import io
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from toolkit.checkpoint.checksum import crc32_of_range
from toolkit.checkpoint.reader import Member
from toolkit.errors import UserError

_END, _END64, _LOCATOR = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_ENTRY, _LOCAL = b"PK\1\2", b"PK\3\4"
_MOST_DIRECTORY_BYTES = 256 << 20
_STORED = 0  # the zip method of members that are not compressed


@dataclass(frozen=True)
class Archive:
    """A zip file's members by name."""

    file: Path
    members: dict[str, Member]

    def read(self, name: str, most: int) -> bytes:
        """A whole member, its checksum compared. Raises UserError if it is larger than `most` bytes."""
        member = self.members[name]
        if member.size > most:
            raise UserError(f"{self.file}: {name} holds {member.size:,} bytes, more than is believable: damaged?")
        verify_member(member)
        with self.file.open("rb") as opened:
            opened.seek(member.offset)
            return opened.read(member.size)


def verify_member(member: Member) -> None:
    """Compares a member's bytes with its checksum, where the file holds one. Raises UserError."""
    if member.crc32 is None:
        return
    found = crc32_of_range(member.file, member.offset, member.size)
    if found != member.crc32:
        raise UserError(
            f"{member.file}: the bytes of {member.name} have the checksum {found:08x} and were written with "
            f"{member.crc32:08x}: damaged, copy the file again or take another checkpoint"
        )


def open_archive(file: Path, start: int = 0, size: int | None = None) -> Archive:
    """Reads the directory of the zip file that fills `size` bytes of `file` from `start` on.

    Raises UserError for files that are missing, truncated, compressed, of an old format, or damaged.
    """
    try:
        with file.open("rb", buffering=0) as opened:
            length = os.fstat(opened.fileno()).st_size
            size = length - start if size is None else size
            if start < 0 or size < 0 or start + size > length:
                raise UserError(f"{file} holds {length:,} bytes and should hold {start + size:,}: truncated")
            return Archive(file, _Directory(file, opened, start, size).members())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


@dataclass(frozen=True)
class _Entry:
    name: str
    crc32: int
    size: int
    offset: int
    """Of the local header, from the archive's beginning."""


class _Directory:
    def __init__(self, file: Path, opened: io.FileIO, start: int, size: int) -> None:
        self.file, self.opened, self.start, self.size = file, opened, start, size

    def members(self) -> dict[str, Member]:
        offset, size, count = self._bounds()
        if size > _MOST_DIRECTORY_BYTES:
            raise self._damaged(f"a directory of {size:,} bytes")
        entries = self._entries(self._bytes(offset, size), count)
        members = {entry.name: self._member(entry, offset) for entry in entries}
        if len(members) < len(entries):
            raise self._damaged("two members of one name")
        self._refuse_overlaps(entries, members)
        return members

    def _bounds(self) -> tuple[int, int, int]:
        """(offset, bytes, entries) of the directory."""
        end = self._bytes(self.size - 22, 22) if self.size >= 22 else b""
        if not end.startswith(_END):
            raise UserError(f"{self.file}: {self._what_it_is()}")
        _, disk, first_disk, here, count, size, offset, comment = struct.unpack("<4s4H2LH", end)
        if disk or first_disk or here != count or comment:
            raise self._damaged("an end record that torch does not write")
        directory_end = self.size - 22
        if count == 0xFFFF or 0xFFFFFFFF in (size, offset):
            offset, size, count, directory_end = self._bounds64()
        if offset + size > directory_end:
            raise self._damaged("a directory outside the file")
        return offset, size, count

    def _bounds64(self) -> tuple[int, int, int, int]:
        signature, _, where, _ = struct.unpack("<4sLQL", self._bytes(self.size - 42, 20))
        if signature != _LOCATOR:
            raise self._damaged("no 64-bit end record")
        record = self._bytes(where, 56)
        if not record.startswith(_END64):
            raise self._damaged("no 64-bit end record")
        count, size, offset = struct.unpack("<3Q", record[32:56])
        return offset, size, count, where

    def _entries(self, directory: bytes, count: int) -> list[_Entry]:
        entries, at = [], 0
        while at < len(directory):
            if directory[at : at + 4] != _ENTRY or at + 46 > len(directory):
                raise self._damaged("a broken directory")
            entry, at = self._entry(directory, at)
            entries.append(entry)
        if len(entries) != count:
            raise self._damaged(f"{len(entries)} members where {count} are announced")
        return entries

    def _entry(self, directory: bytes, at: int) -> tuple[_Entry, int]:
        flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes = struct.unpack_from(
            "<4HLLL3H", directory, at + 8
        )
        (offset,) = struct.unpack_from("<L", directory, at + 42)
        name_at, extra_at = at + 46, at + 46 + name_bytes
        end = extra_at + extra_bytes + comment_bytes
        if end > len(directory):
            raise self._damaged("a broken directory")
        name = directory[name_at:extra_at].decode("utf-8", "replace")
        size, packed, offset = self._wide(directory[extra_at : extra_at + extra_bytes], [size, packed, offset])
        if method != _STORED or packed != size or flags & 1:
            raise UserError(f"{self.file}: {name} is compressed, and torch.save never does that: save it with torch")
        return _Entry(name, crc, size, offset), end

    def _wide(self, extra: bytes, values: list[int]) -> list[int]:
        """The values, those that do not fit into 32 bits taken from the extra field."""
        missing = [index for index, value in enumerate(values) if value == 0xFFFFFFFF]
        at = 0
        while missing and at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            if kind == 1 and length >= 8 * len(missing) and at + 4 + length <= len(extra):
                for order, index in enumerate(missing):
                    (values[index],) = struct.unpack_from("<Q", extra, at + 4 + 8 * order)
                return values
            at += 4 + length
        if missing:
            raise self._damaged("no 64-bit sizes")
        return values

    def _member(self, entry: _Entry, directory: int) -> Member:
        header = self._bytes(entry.offset, 30)
        if not header.startswith(_LOCAL):
            raise self._damaged(f"no header before {entry.name}")
        name_bytes, extra_bytes = struct.unpack_from("<2H", header, 26)
        if self._bytes(entry.offset + 30, name_bytes).decode("utf-8", "replace") != entry.name:
            raise self._damaged(f"another name before {entry.name}")
        begin = entry.offset + 30 + name_bytes + extra_bytes
        if begin + entry.size > directory:
            raise self._damaged(f"{entry.name} outside the file")
        return Member(self.file, entry.name, self.start + begin, entry.size, entry.crc32)

    def _refuse_overlaps(self, entries: list[_Entry], members: dict[str, Member]) -> None:
        ordered = sorted(entries, key=lambda entry: entry.offset)
        for before, entry in pairwise(ordered):
            end = members[before.name].offset + before.size
            if end > self.start + entry.offset:
                raise self._damaged(f"{before.name} and {entry.name} in the same place")

    def _bytes(self, offset: int, count: int) -> bytes:
        if offset < 0 or offset + count > self.size:
            raise self._damaged("a record outside the file")
        content = os.pread(self.opened.fileno(), count, self.start + offset)
        if len(content) < count:
            raise self._damaged("a record outside the file")
        return content

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self.file} is damaged: its zip structure has {what}; copy it again or take another one")

    def _what_it_is(self) -> str:
        """Why there is no end record."""
        if self.size == 0:
            return "the file is empty; copy it again or take another checkpoint"
        if self._bytes(0, min(self.size, 4)) == _LOCAL:
            return "the end of the file is missing: truncated; copy it again or take another checkpoint"
        if self._bytes(0, 1) == b"\x80":
            return (
                "written in torch's old format, before zip files, which cannot be read without executing it; "
                "load and save it again with torch.save, if you trust it"
            )
        return "not a file that torch.save wrote, or its beginning and end are damaged"
