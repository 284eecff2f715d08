"""The CRC32 of two runs of bytes, one after the other, from the CRC32 of each.

A file can so be read in parts by several threads and still be checked as a whole. This is zlib's
`crc32_combine`, which Python does not offer: multiplication of polynomials over GF(2), bits reflected.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1


def combine(first: int, second: int, second_size: int) -> int:
    """CRC32 of `a + b` where `first` is a's, `second` is b's and b has `second_size` bytes."""
    return _times(_shift(second_size), first) ^ second


def _times(left: int, right: int) -> int:
    """The product modulo the CRC's polynomial."""
    product, bit = 0, _ONE
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@lru_cache(maxsize=64)
def _shift(size: int) -> int:
    """x to the power of 8 * size: what appending `size` zero bytes multiplies by."""
    power, square, exponent = _ONE, _ONE >> 1, 8 * size
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power
