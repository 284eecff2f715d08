"""Zip structures beyond what small files of torch have; checksums."""

from __future__ import annotations

import io
import os
import re
import zipfile
from pathlib import Path

import torch

from tests.checkpoint.handmade import rewritten
from tests.faults import refusal
from toolkit.checkpoint.read.torch_archive import open_torch_archive, zip_members


def test_64_bit_offsets(tmp_path: Path) -> None:
    file = tmp_path / "wide.pt"
    with file.open("wb") as opened:
        opened.seek(5 << 30)  # a hole
        with zipfile.ZipFile(opened, "w") as written, written.open("a/data/1", "w", force_zip64=True) as member:
            member.write(b"1234567")
    (actual,) = zip_members(file).values()
    with file.open("rb") as opened:
        opened.seek(actual.offset)
        assert (actual.offset > 5 << 30, opened.read(actual.size)) == (True, b"1234567")
    os.truncate(file, file.stat().st_size - 1)
    refusal(zip_members, file, match=re.escape(str(file)))


def test_a_file_inside_a_file(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint writes them."""
    content = io.BytesIO()
    torch.save(torch.arange(5.0), content)
    inner = content.getvalue()
    file = tmp_path / "rows"
    file.write_bytes(b"#" * 77 + inner + b"#" * 10)
    opened = open_torch_archive(file, start=77, size=len(inner))
    assert opened.index("x", opened.content).read() == torch.arange(5.0).numpy().tobytes()
    for member in opened.members.values():
        member.verify()
    refusal(open_torch_archive, file, start=76, size=len(inner), match="rows")
    refusal(open_torch_archive, file, start=77, size=len(inner) + 11, match="truncated")


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "big.pt"
    torch.save({}, file)
    file.write_bytes(rewritten(file, lambda name, old: b"big" if name.endswith("byteorder") else old))
    refusal(open_torch_archive, file, match=r"big\.pt was written on a big-endian machine")
