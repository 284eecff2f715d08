"""Casts blocks of numbers between floating dtypes, and adds LoRA's product to them. Imports no torch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from toolkit.checkpoint.lora import LoraDelta
from toolkit.errors import UserError

_NUMPY: dict[str, np.dtype] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_ROWS = 64  # of a merged weight, summed at a time


def widen(block: bytearray | memoryview, dtype: str, name: str = "") -> np.ndarray:
    """A block's numbers as fp32. Raises UserError, naming the tensor, if one becomes infinite."""
    if dtype == "BF16":
        bits = np.frombuffer(block, np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return _cast(np.frombuffer(block, _NUMPY[dtype]), "F32", name)


def narrow(values: np.ndarray, dtype: str, name: str = "") -> memoryview:
    """fp32 numbers as bytes of `dtype`. Raises UserError if one becomes infinite."""
    numbers = _round_to_bf16(values) if dtype == "BF16" else _cast(values, dtype, name)
    return numbers.data.cast("B")


def _round_to_bf16(values: np.ndarray) -> np.ndarray:
    """The bits of bf16, rounded to even as torch does; a NaN keeps its sign.

    The upper half of (bits + 0x7fff + the upper half's last bit): the carry does the rounding.
    """
    fp32_bits = values.view(np.uint32)
    bits = fp32_bits >> 16
    bits &= 1
    bits += 0x7FFF
    bits += fp32_bits
    bits >>= 16
    bf16_bits = bits.astype(np.uint16)
    if len(values) and np.isnan(values.max()):  # the maximum is NaN if any number is
        nans = np.isnan(values)
        bf16_bits[nans] = (fp32_bits[nans] >> 16) | 0x0040
    return bf16_bits


def _cast(numbers: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """numpy's cast. Raises UserError if a finite number becomes infinite."""
    with np.errstate(all="ignore", over="raise"):
        try:
            return numbers.astype(_NUMPY[dtype], copy=False)
        except FloatingPointError:
            raise UserError(f"{name} has a number that is infinite in {dtype.lower()}: use --dtype bf16") from None


def add_delta(delta: LoraDelta, values: np.ndarray, first: int) -> np.ndarray:
    """A new array: `values`, fp32 elements of the flat weight from `first` on, plus LoRA's.

    The bits of the sum do not depend on how the weight is cut into blocks.
    """
    left, right = _factors(delta)
    columns = right.shape[1]
    top, bottom = first // columns // _ROWS * _ROWS, -(-(first + len(values)) // columns)
    rows = np.concatenate([left[row : row + _ROWS] @ right for row in range(top, bottom, _ROWS)])
    rows *= delta.scaling
    summed: np.ndarray = rows.reshape(-1)[first - top * columns :][: len(values)]
    summed += values
    return summed


@lru_cache(maxsize=4)  # one per thread
def _factors(delta: LoraDelta) -> tuple[np.ndarray, np.ndarray]:
    """(rows, rank) and (rank, columns): their product has the weight's shape."""
    a, b = (widen(factor.read(), factor.dtype, factor.name).reshape(factor.shape) for factor in (delta.a, delta.b))
    return (a.T.copy(), b.T.copy()) if delta.transposed else (b, a)
