"""Reads what was written and compares it with the checkpoint, number by number.

It goes another way than the writing did: by the output's own headers, tensor by tensor, each taken from
its spans in order, so that a fault of the plan shows as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from toolkit.checkpoint.convert.casts import Caster
from toolkit.checkpoint.convert.shards import Shard
from toolkit.checkpoint.convert.transfer import converted
from toolkit.checkpoint.reader import ITEM_BYTES, TensorIndex
from toolkit.checkpoint.tensors_file import read_header
from toolkit.errors import UserError

_ELEMENTS = 1 << 18  # compared at a time
# Of a merged weight: the sum's last bits depend on how its rows are divided into blocks.
_RELATIVE = {"F32": 1e-6, "F16": 2e-3, "BF16": 1.6e-2}
_ABSOLUTE = 1e-6


def verify(folder: Path, shards: list[Shard], progress: Callable[[int], object]) -> tuple[int, int]:
    """(tensors compared, of them merged ones, which agree to rounding and not to the bit).

    Raises UserError naming the first tensor that differs.
    """
    caster, count, merged = Caster(_ELEMENTS), 0, 0
    for shard in shards:
        path = folder / shard.name
        forget(path)
        written = read_header(path).tensors
        if set(written) != {output.name for output in shard.outputs}:
            raise UserError(f"{path} does not hold the tensors that were to be written: the disk or memory is faulty")
        for output in shard.outputs:
            target = written[output.name]
            for first in range(0, target.count, _ELEMENTS):
                size = min(_ELEMENTS, target.count - first)
                numbers = memoryview(output.stored.read(first, size))
                expected = converted(numbers, output.stored, target.dtype, first, output.delta, caster)
                found = target.read(first, size)
                if found != expected and not (output.delta is not None and _near(found, expected, target)):
                    raise UserError(f"{output.name} in {path} differs from {output.stored.name} of the checkpoint")
                progress(size * ITEM_BYTES[target.dtype])
            count, merged = count + 1, merged + (output.delta is not None)
    return count, merged


def _near(found: bytearray, expected: memoryview, target: TensorIndex) -> bool:
    one, other = Caster(_ELEMENTS), Caster(_ELEMENTS)
    left, right = one.widen(memoryview(found), target.dtype), other.widen(expected, target.dtype)
    return bool(np.allclose(left, right, rtol=_RELATIVE[target.dtype], atol=_ABSOLUTE, equal_nan=True))


def forget(path: Path) -> None:
    """Drops the file from memory, so that what is compared comes from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
