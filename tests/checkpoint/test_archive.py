"""Zip structures beyond what small files of torch have; buffers of elements; checksums."""

from __future__ import annotations

import io
import os
import random
import re
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from toolkit.checkpoint.checksum import crc32, crc32_of_range
from toolkit.checkpoint.read.deepspeed_layout import FlatBuffer
from toolkit.checkpoint.read.torch_file import open_torch_file, verify_member, zip_members
from toolkit.checkpoint.reader import Member, Span
from toolkit.errors import UserError

GIB = 1 << 30
WIDE = 0xFFFFFFFF  # says that the true number is elsewhere


def write_wide(file: Path) -> None:
    """A zip file with a member of 5 GiB and one after it: 64-bit sizes and offsets. All holes."""
    entries, place = [], 0
    with file.open("wb") as opened:
        for name, size in ((b"a/data/0", 5 * GIB), (b"a/data/1", 7)):
            extra = struct.pack("<2H2Q", 1, 16, size, size)
            header = struct.pack(
                "<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra)
            )
            opened.seek(place)
            opened.write(header + name + extra)
            wide = struct.pack("<2H3Q", 1, 24, size, size, place)
            entries.append(
                struct.pack("<4s6H3L", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, WIDE, WIDE)
                + struct.pack("<5H2L", len(name), len(wide), 0, 0, 0, 0, WIDE)
                + name
                + wide
            )
            place = opened.tell() + size
        directory = b"".join(entries)
        end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(directory), place)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, place + len(directory), 1)
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(directory), WIDE, 0)
        opened.seek(place)
        opened.write(directory + end64 + locator + end)


def test_64_bit_sizes_and_offsets(tmp_path: Path) -> None:
    file = tmp_path / "wide.pt"
    write_wide(file)
    members = zip_members(file)
    with zipfile.ZipFile(file) as known:  # Python's own reader agrees
        for entry in known.infolist():
            assert members[entry.filename].size == entry.file_size
            assert members[entry.filename].offset > entry.header_offset
    assert members["a/data/1"].offset > 5 * GIB
    content = file.stat().st_size
    os.truncate(file, content - 1)
    with pytest.raises(UserError, match=re.escape(f"{file}: the end of the file is missing")):
        zip_members(file)


def test_two_members_in_one_place(tmp_path: Path) -> None:
    file = tmp_path / "same.pt"
    with zipfile.ZipFile(file, "w") as written:
        written.writestr("a", b"")
        written.writestr("b", b"xyz")
    content = bytearray(file.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 20 : at + 28] = struct.pack("<2L", 30, 30)  # the first reaches over the second
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"same\.pt is damaged.*same place"):
        zip_members(file)


def test_a_file_inside_a_file(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint writes them."""
    content = io.BytesIO()
    torch.save(torch.arange(5.0), content)
    inner = content.getvalue()
    file = tmp_path / "rows"
    file.write_bytes(b"#" * 77 + inner + b"#" * 10)
    opened = open_torch_file(file, start=77, size=len(inner))
    assert opened.stored("x", opened.content).read() == torch.arange(5.0).numpy().tobytes()
    for member in opened.members.values():
        verify_member(member)
    with pytest.raises(UserError, match="rows"):
        open_torch_file(file, start=76, size=len(inner))
    with pytest.raises(UserError, match="truncated"):
        open_torch_file(file, start=77, size=len(inner) + 11)


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save({}, content)
    with zipfile.ZipFile(content) as read, zipfile.ZipFile(tmp_path / "big.pt", "w") as written:
        for name in read.namelist():
            written.writestr(name, b"big" if name.endswith("byteorder") else read.read(name))
    with pytest.raises(UserError, match=r"big\.pt was written on a big-endian machine"):
        open_torch_file(tmp_path / "big.pt")


def test_checksums_are_zlibs(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3_000_001)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[1000:], crc32(data[:1000])) == zlib.crc32(data)
    (tmp_path / "a").write_bytes(data)
    assert crc32_of_range(tmp_path / "a") == zlib.crc32(data)
    assert crc32_of_range(tmp_path / "a", 5, 2_000_000) == zlib.crc32(data[5 : 5 + 2_000_000])
    assert crc32_of_range(tmp_path / "a", 5, 0) == 0
    with pytest.raises(UserError, match="checksum"):
        verify_member(Member(tmp_path / "a", "x", 5, 10, 0))


def test_a_buffer_is_cut_at_any_place() -> None:
    """Against a list of the same elements: every cut of a buffer of chunks with gaps."""
    chunks = [(0, 3), (3, 0), (3, 4), (9, 2), (11, 1)]  # elements 7 and 8 are padding
    members = [Member(Path("f"), str(number), 100 * number, 100) for number in range(len(chunks))]
    elements: dict[int, tuple[str, int]] = {}
    for member, (start, count) in zip(members, chunks, strict=True):
        elements |= {start + offset: (member.name, 8 + 4 * offset) for offset in range(count)}
    buffer = FlatBuffer(
        "F32", [(start, Span(member, 8, count)) for member, (start, count) in zip(members, chunks, strict=True)]
    )
    assert buffer.count == len(elements)
    for start in range(-1, 14):
        for count in range(14):
            wanted = [elements.get(place) for place in range(start, start + count)]
            if None in wanted:
                with pytest.raises(LookupError):
                    buffer.cut(start, count)
            else:
                spans = buffer.cut(start, count)
                found = [(span.member.name, span.start + 4 * offset) for span in spans for offset in range(span.count)]
                assert found == wanted
                assert all(span.count for span in spans)
