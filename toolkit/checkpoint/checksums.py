"""CRC32 of bytes, and of a concatenation from the CRC32s of its parts."""

from __future__ import annotations

import zlib

_POLYNOMIAL = 0xEDB88320
"""Of CRC32: bit 31 is the lowest power, and x^32 is left out."""


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo CRC32's."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
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
