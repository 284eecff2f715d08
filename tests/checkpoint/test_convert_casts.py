"""Casts give torch's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit.checkpoint.convert.casts import narrow, widen

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def patterns() -> np.ndarray:
    """fp32 bit patterns: all bf16 ones with every interesting tail, ties on both sides, and random ones."""
    tails = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    exact = (ALL_HALVES.astype(np.uint32) << 16)[None] | np.array(tails, np.uint32)[:, None]
    return np.concatenate([exact.ravel(), np.random.default_rng(0).integers(0, 1 << 32, 100_003, dtype=np.uint32)])


def tensor_of(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16 if bits.itemsize == 2 else np.int32)).view(DTYPES[dtype])


def cast(tensor: torch.Tensor, source: str, target: str) -> torch.Tensor:
    done = narrow(widen(memoryview(tensor.view(torch.uint8).numpy().tobytes()), source), target)
    return tensor_of(np.frombuffer(done, np.uint32 if target == "F32" else np.uint16).copy(), target)


@pytest.mark.parametrize(
    ("source", "target"), [("F32", "BF16"), ("F32", "F16"), ("BF16", "F32"), ("F16", "F32"), ("BF16", "F16")]
)
def test_casts_are_torchs_to_the_bit(source: str, target: str) -> None:
    """Except a NaN's payload (the sign stays), and numbers that become infinite in fp16: they are refused."""
    values = tensor_of(patterns() if source == "F32" else ALL_HALVES, source)
    expected = values.to(DTYPES[target])
    numbers = ~values.isnan() & ~(expected.isinf() & ~values.isinf() if target == "F16" else torch.zeros(1).bool())
    assert torch.equal(cast(values[numbers], source, target).view(torch.uint8), expected[numbers].view(torch.uint8))
    nans = cast(values[values.isnan()], source, target)
    assert nans.isnan().all()
    assert torch.equal(nans.signbit(), values[values.isnan()].signbit())
