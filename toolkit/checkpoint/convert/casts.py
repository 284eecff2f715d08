"""Blocks of numbers from one floating dtype to another, and what LoRA adds to them. No torch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from toolkit.checkpoint.lora import LoraDelta
from toolkit.errors import UserError

_NUMPY: dict[str, np.dtype] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_ROWS = 64  # of a merged weight, summed at a time


def widen(block: bytearray | memoryview, dtype: str, name: str = "") -> np.ndarray:
    """The numbers of a block as fp32. `name`: of the tensor, for the error where one would become infinite."""
    if dtype == "BF16":
        bits = np.frombuffer(block, np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return _as(np.frombuffer(block, _NUMPY[dtype]), "F32", name)


def narrow(values: np.ndarray, dtype: str, name: str = "") -> memoryview:
    """fp32 numbers as bytes of `dtype`. Raises UserError where one becomes infinite."""
    numbers = _rounded(values) if dtype == "BF16" else _as(values, dtype, name)
    return numbers.data.cast("B")


def _rounded(values: np.ndarray) -> np.ndarray:
    """To bf16, ties to even, as torch rounds; a NaN stays one, with its sign.

    bits + 0x7fff + (the last bit that stays), cut: the carry does the rounding.
    """
    whole = values.view(np.uint32)
    bits = whole >> 16
    bits &= 1
    bits += 0x7FFF
    bits += whole
    bits >>= 16
    halves = bits.astype(np.uint16)
    if len(values) and np.isnan(values.max()):  # the largest is NaN as soon as one is
        nans = np.isnan(values)
        halves[nans] = (whole[nans] >> 16) | 0x0040
    return halves


def _as(numbers: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """numpy's own cast, with an error in place of a warning when a finite number becomes infinite."""
    with np.errstate(all="ignore", over="raise"):
        try:
            return numbers.astype(_NUMPY[dtype], copy=False)
        except FloatingPointError:
            raise UserError(f"{name} has a number that is infinite in {dtype.lower()}: use --dtype bf16") from None


def add_delta(delta: LoraDelta, values: np.ndarray, first: int) -> np.ndarray:
    """A new array: `values`, fp32 elements of the flat weight from `first` on, plus what LoRA adds to them.

    The bits of the sum do not depend on which elements are computed together.
    """
    left, right = _factors(delta)
    columns = right.shape[1]
    top, bottom = first // columns // _ROWS * _ROWS, -(-(first + len(values)) // columns)
    rows = np.concatenate([left[row : row + _ROWS] @ right for row in range(top, bottom, _ROWS)])
    rows *= delta.scaling
    summed: np.ndarray = rows.reshape(-1)[first - top * columns :][: len(values)]
    summed += values
    return summed


@lru_cache(maxsize=4)  # one for each thread: each works on one weight at a time
def _factors(delta: LoraDelta) -> tuple[np.ndarray, np.ndarray]:
    """Those whose product is of the weight's shape: (rows, rank), (rank, columns)."""
    a, b = (widen(factor.read(), factor.dtype, factor.name).reshape(factor.shape) for factor in (delta.a, delta.b))
    return (a.T.copy(), b.T.copy()) if delta.transposed else (b, a)
