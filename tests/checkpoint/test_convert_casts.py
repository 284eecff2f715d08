"""Casts give torch's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit.checkpoint.convert.casts import narrow, widen
from toolkit.errors import UserError

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)


def patterns() -> np.ndarray:
    """fp32 bit patterns: all bf16 ones with every interesting tail, ties on both sides, and random ones."""
    tails = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    exact = (ALL_HALVES.astype(np.uint32) << 16)[None] | np.array(tails, np.uint32)[:, None]
    return np.concatenate([exact.ravel(), np.random.default_rng(0).integers(0, 1 << 32, 100_003, dtype=np.uint32)])


def torch_of(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16 if bits.itemsize == 2 else np.int32)).view(dtype)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    signed = torch.int16 if tensor.element_size() == 2 else torch.int32
    return tensor.view(signed).numpy().view(np.uint16 if tensor.element_size() == 2 else np.uint32)


def cast(bits: np.ndarray, dtype: str, wanted: str) -> np.ndarray:
    done = narrow(widen(memoryview(bits.tobytes()), dtype), wanted)
    return np.frombuffer(done, np.uint32 if wanted == "F32" else np.uint16).copy()


def test_bf16_rounds_as_torch_does() -> None:
    """But a NaN's payload: it stays one, quiet, with its sign."""
    bits = patterns()
    expected, found = bits_of(torch_of(bits, torch.float32).to(torch.bfloat16)), cast(bits, "F32", "BF16")
    lost = np.isnan(bits.view(np.float32))
    assert np.array_equal(found[~lost], expected[~lost])
    assert np.all((found[lost] & 0x7FC0) == 0x7FC0)
    assert np.array_equal(found[lost] >> 15, bits[lost] >> 31)


def test_fp16_rounds_as_torch_does() -> None:
    bits = patterns()
    size = np.abs(bits.view(np.float32))
    bits = bits[(size < 65520) | np.isinf(size)]
    assert np.array_equal(cast(bits, "F32", "F16"), bits_of(torch_of(bits, torch.float32).to(torch.float16)))


@pytest.mark.parametrize("value", [65520.0, -65520.0, 1e30])
def test_fp16_refuses_what_would_be_infinite(value: float) -> None:
    with pytest.raises(UserError):
        cast(np.array([1, value], np.float32).view(np.uint32), "F32", "F16")
    cast(np.array([65519, np.inf, np.nan], np.float32).view(np.uint32), "F32", "F16")


@pytest.mark.parametrize(("name", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_halves_become_fp32_exactly(name: str, dtype: torch.dtype) -> None:
    tensor = torch_of(ALL_HALVES, dtype)
    numbers = ~torch.isnan(tensor).numpy()
    found = cast(ALL_HALVES, name, "F32")
    assert np.array_equal(found[numbers], bits_of(tensor.float())[numbers])
    assert np.all(np.isnan(found.view(np.float32)[~numbers]))
    assert np.array_equal(cast(found, "F32", name)[numbers], ALL_HALVES[numbers])


def test_between_halves_and_from_double() -> None:
    bf16 = torch_of(ALL_HALVES, torch.bfloat16)
    fits = (bf16.float().abs() < 65520).numpy()
    found = cast(ALL_HALVES[fits].copy(), "BF16", "F16")
    assert np.array_equal(found, bits_of(bf16[torch.from_numpy(fits)].to(torch.float16)))
    doubles = np.random.default_rng(1).standard_normal(999)
    made = widen(memoryview(doubles.tobytes()), "F64")
    assert np.array_equal(made, doubles.astype(np.float32))
