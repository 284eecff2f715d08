"""What a LoRA adapter adds to a weight, computed for the rows that are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from toolkit.checkpoint.convert.casts import Caster
from toolkit.checkpoint.reader import TensorIndex


@dataclass(frozen=True, eq=False)
class Delta:
    """scaling * B @ A, or its transpose. Of the factors only what a block needs is read."""

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
        rows = np.matmul(self._left(top, bottom), _right(self))  # (bottom - top, columns)
        rows *= np.float32(self.scaling)
        added = rows.reshape(-1)[first - top * columns :][: len(values)]
        added += values
        return added

    def _left(self, top: int, bottom: int) -> np.ndarray:
        """Rows of the first factor: (bottom - top, rank)."""
        rank, wide = self.a.shape
        if not self.transposed:
            return _numbers(self.b, top * rank, (bottom - top) * rank).reshape(-1, rank)
        rows = [_numbers(self.a, row * wide + top, bottom - top) for row in range(rank)]
        return np.stack(rows, axis=1)


@lru_cache(maxsize=8)  # as many as there are threads: each is at one weight at a time
def _right(delta: Delta) -> np.ndarray:
    """The second factor: (rank, columns)."""
    if delta.transposed:
        return _numbers(delta.b, 0, delta.b.count).reshape(delta.b.shape).T.copy()
    return _numbers(delta.a, 0, delta.a.count).reshape(delta.a.shape)


def _numbers(stored: TensorIndex, first: int, count: int) -> np.ndarray:
    """Elements as fp32."""
    return Caster(count).widen(memoryview(stored.read(first, count)), stored.dtype)
