"""Reads what was written and compares it with the checkpoint, number by number.

It goes another way than the writing did: by the output's own headers, tensor by tensor, each taken from
its spans in order, so that a fault of the plan shows as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from toolkit.checkpoint.convert.casts import Caster
from toolkit.checkpoint.convert.select import Output
from toolkit.checkpoint.convert.transfer import Shard, converted
from toolkit.checkpoint.reader import ITEM_BYTES, TensorIndex
from toolkit.checkpoint.tensors_file import read_header
from toolkit.errors import UserError

_ELEMENTS = 1 << 18  # compared at a time
# Of a merged weight: the sum's last bits depend on how its rows are divided into blocks.
_RELATIVE = {"F32": 1e-6, "F16": 2e-3, "BF16": 1.6e-2}
_ABSOLUTE = 1e-6


def verify(folder: Path, shards: Sequence[Shard], progress: Callable[[int], object]) -> tuple[int, int]:
    """(tensors compared, of them merged ones, which agree to rounding and not to the bit).

    Raises UserError naming the first tensor that differs.
    """
    outputs = [output for shard in shards for output in shard.outputs]
    for shard in shards:
        path = folder / shard.name
        with path.open("rb") as file:  # out of memory with it: what is compared comes from the disk
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written = read_header(path).tensors
        if set(written) != {output.name for output in shard.outputs}:
            raise UserError(f"{path} does not hold the tensors that were to be written: the disk or memory is faulty")
        for output in shard.outputs:
            if not _same(output, written[output.name], progress):
                raise UserError(f"{output.name} in {path} differs from {output.stored.name} of the checkpoint")
    return len(outputs), sum(output.delta is not None for output in outputs)


def _same(output: Output, written: TensorIndex, progress: Callable[[int], object]) -> bool:
    caster = Caster(_ELEMENTS)
    for first in range(0, written.count, _ELEMENTS):
        size = min(_ELEMENTS, written.count - first)
        expected = converted(output, memoryview(output.stored.read(first, size)), written.dtype, first, caster)
        found = written.read(first, size)
        if found != expected and not (output.delta is not None and _near(found, expected, written.dtype)):
            return False
        progress(size * ITEM_BYTES[written.dtype])
    return True


def _near(found: bytearray, expected: memoryview, dtype: str) -> bool:
    left = Caster(_ELEMENTS).widen(memoryview(found), dtype)
    right = Caster(_ELEMENTS).widen(expected, dtype)
    return bool(np.allclose(left, right, rtol=_RELATIVE[dtype], atol=_ABSOLUTE, equal_nan=True))
