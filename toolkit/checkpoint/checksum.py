"""CRC32 as zip files, our safetensors files and `manifest.json` hold it; reading files in blocks. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from isal.isal_zlib import crc32 as crc32  # 30 GB/s where the standard library's does 1 to 3
from isal.isal_zlib import crc32_combine as combine  # of `a + b`: (CRC32 of a, CRC32 of b, bytes of b)

from toolkit.errors import UserError

__all__ = ["blocks", "combine", "crc32", "crc32_of_range", "read_into"]


def read_into(file: Path, start: int, view: memoryview) -> None:
    """Fills `view` from byte `start` on. Raises UserError where the file ends first, and OSError."""
    with file.open("rb", buffering=0) as opened:
        _fill(opened, file, start, view)


def blocks(file: Path, start: int, size: int, block: int = 1 << 20) -> Iterator[memoryview]:
    """`size` bytes from `start` on, at most `block` at a time: good until the next are asked for.

    Raises UserError where they cannot be read.
    """
    buffer = memoryview(bytearray(min(block, size)))
    try:
        with file.open("rb", buffering=0) as opened:
            for place in range(start, start + size, block):
                view = buffer[: min(block, start + size - place)]
                _fill(opened, file, place, view)
                yield view
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


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
