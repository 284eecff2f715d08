"""CRC32, of bytes and of bytes one after another: as zip files and safetensors headers of ours have them."""

from __future__ import annotations

import zlib

_POLYNOMIAL = 0xEDB88320
"""Of CRC32, bit 31 the lowest power; that of x^32 is not written."""


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo CRC32's."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def combine(first: int, second: int, size: int) -> int:
    """The CRC32 of two byte strings one after the other, of theirs and the second's `size`: the first, times
    x^(8 size), plus the second (zlib's crc32_combine)."""
    power = 1 << 23  # x^8
    while size:
        first = _times(power, first) if size & 1 else first
        power, size = _times(power, power), size >> 1
    return first ^ second


try:
    from isal.isal_zlib import crc32, crc32_combine  # 30 GB/s; the extra `fast`
except ImportError:
    crc32, crc32_combine = zlib.crc32, combine  # 1 to 3 GB/s
