"""Numbers on their way, block by block: from one floating dtype to another, and what LoRA adds. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from toolkit.checkpoint.lora import weight_change
from toolkit.checkpoint.reader import FLOATS, TensorIndex

_NUMPY: dict[str, np.dtype] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


class TooLargeError(Exception):
    """A finite number that the wanted dtype can only hold as infinity."""


class Caster:
    """Casts blocks of at most `elements` numbers. One for each thread: the buffers are its own.

    What comes out lies in those buffers, and is good until the next call.
    """

    def __init__(self, elements: int) -> None:
        self._bits = np.empty(elements, np.uint32)
        self._values = np.empty(elements, np.float32)
        self._halves = np.empty(elements, np.uint16)

    def cast(self, block: memoryview, dtype: str, wanted: str) -> memoryview:
        """The numbers of `block` as `wanted`. Raises TooLargeError where one becomes infinite."""
        if dtype == wanted or dtype not in FLOATS:
            return block
        return self.narrow(self.widen(block, dtype), wanted)

    def widen(self, block: memoryview, dtype: str) -> np.ndarray:
        """The numbers as fp32: a view of the block where they are, else in this caster's buffer."""
        if dtype == "F32":
            return np.frombuffer(block, np.float32)
        if dtype == "BF16":
            halves = np.frombuffer(block, np.uint16)
            bits = self._values.view(np.uint32)[: len(halves)]
            bits[:] = halves
            np.left_shift(bits, 16, out=bits)
            return bits.view(np.float32)
        numbers = np.frombuffer(block, _NUMPY[dtype])
        values = self._values[: len(numbers)]
        _copy(values, numbers)
        return values

    def narrow(self, values: np.ndarray, wanted: str) -> memoryview:
        """fp32 numbers as `wanted`. Raises TooLargeError where one becomes infinite."""
        if wanted == "F32":
            return values.data.cast("B")
        halves = self._halves[: len(values)]
        if wanted == "BF16":
            self._round(values, halves)
        else:
            _copy(halves.view(np.float16), values)
        return halves.data.cast("B")

    def _round(self, values: np.ndarray, halves: np.ndarray) -> None:
        """To bf16, ties to even, as torch rounds; a NaN stays one, with its sign.

        bits + 0x7fff + (the last bit that stays), cut: the carry does the rounding.
        """
        found = values.view(np.uint32)
        bits = self._bits[: len(found)]
        np.right_shift(found, 16, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.add(bits, 0x7FFF, out=bits)
        np.add(bits, found, out=bits)
        np.right_shift(bits, 16, out=bits)
        halves[:] = bits
        if len(values) and np.isnan(values.max()):  # the largest is NaN as soon as one is
            lost = np.isnan(values)
            halves[lost] = (found[lost] >> 16) | 0x0040


def _copy(target: np.ndarray, numbers: np.ndarray) -> None:
    """numpy's own cast, with an error in place of a warning when a finite number becomes infinite."""
    with np.errstate(all="ignore", over="raise"):
        try:
            target[:] = numbers
        except FloatingPointError:
            raise TooLargeError from None


@dataclass(frozen=True, eq=False)
class LoraDelta:
    """What a LoRA adapter adds to a weight: of the factors only what the asked rows need is read."""

    a: TensorIndex  # (rank, in)
    b: TensorIndex  # (out, rank)
    scaling: float
    transposed: bool
    """For weights of shape (in, out): embeddings, and layers with `fan_in_fan_out`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.transposed else shape

    def added(self, values: np.ndarray, first: int) -> np.ndarray:
        """A new array: `values`, fp32 elements of the flat weight from `first` on, plus their delta."""
        columns = self.shape[1]
        top, bottom = first // columns, -(-(first + len(values)) // columns)
        rows = weight_change(_right(self), self._left(top, bottom), self.scaling)  # (bottom - top, columns)
        added: np.ndarray = rows.reshape(-1)[first - top * columns :][: len(values)]
        added += values
        return added

    def _left(self, top: int, bottom: int) -> np.ndarray:
        """Rows of the first factor: (bottom - top, rank)."""
        rank, wide = self.a.shape
        if not self.transposed:
            return _numbers(self.b, top * rank, (bottom - top) * rank).reshape(-1, rank)
        return np.stack([_numbers(self.a, row * wide + top, bottom - top) for row in range(rank)], axis=1)


@lru_cache(maxsize=8)  # as many as there are threads: each is at one weight at a time
def _right(delta: LoraDelta) -> np.ndarray:
    """The second factor: (rank, columns)."""
    factor = delta.b if delta.transposed else delta.a
    numbers = _numbers(factor, 0, factor.count).reshape(factor.shape)
    return numbers.T.copy() if delta.transposed else numbers


def _numbers(stored: TensorIndex, first: int, count: int) -> np.ndarray:
    """Elements as fp32."""
    return Caster(count).widen(memoryview(stored.read(first, count)), stored.dtype)
