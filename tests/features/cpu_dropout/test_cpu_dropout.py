"""toolkit/features/cpu_dropout: the frequency of 1, reproducible by torch's generator, used by every dropout."""

import math
import subprocess
import sys

import pytest
import torch

from toolkit.features.cpu_dropout.kernel import _CHUNK, bernoulli


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-4])
def test_frequency_and_independence(dtype: torch.dtype, p: float) -> None:
    drawn = bernoulli(
        torch.empty(4 * _CHUNK + 3, dtype=dtype), p, generator=torch.Generator().manual_seed(1)
    ).float()
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    deviation = math.sqrt(p * (1 - p) / len(drawn))
    assert abs(drawn.mean() - p) < 4 * deviation + 2**-17
    for distance in (1, 2, 4, _CHUNK):  # 1 to 3: drawn from the same 64 bits
        both = (drawn[distance:] * drawn[:-distance]).mean()
        assert abs(both - p * p) < 5 * deviation + 2**-16


def test_the_seed_determines_the_numbers_and_the_generator_advances() -> None:
    generator = torch.Generator().manual_seed(7)
    first, second = (bernoulli(torch.empty(1000), 0.5, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(bernoulli(torch.empty(1000), 0.5, generator=generator.manual_seed(7)), first)


def test_shapes_and_probabilities() -> None:
    transposed = torch.full((300, 500), 7.0).t()
    assert set(bernoulli(transposed, 0.3).unique().tolist()) == {0.0, 1.0}
    assert abs(transposed.mean() - 0.3) < 0.01
    assert bernoulli(torch.empty(0), 0.3).shape == (0,)
    assert [bernoulli(torch.empty(9), p).mean().item() for p in (0.0, 1.0, 1 - 1e-9)] == [
        0.0,
        1.0,
        1.0,
    ]
    for p in (-0.1, 1.1):
        with pytest.raises(RuntimeError, match=str(p)):
            bernoulli(torch.empty(2), p)


def test_every_dropout_uses_it() -> None:
    """In a separate process, since it stays installed."""
    code = """
import warnings
warnings.simplefilter("error")
import torch
from toolkit.features.cpu_dropout import kernel as dropout
calls, bernoulli = [], dropout.bernoulli
def counted(into, p=0.5, *, generator=None):
    calls.append(tuple(into.shape))
    return bernoulli(into, p, generator=generator)
dropout.bernoulli = counted
dropout.install()
dropout.install()
x = torch.ones(2, 3, 40, 16, requires_grad=True)
kept = torch.nn.Dropout(0.25)(x)
kept.sum().backward()
assert torch.equal(x.grad, kept) and torch.allclose(kept.unique(), torch.tensor([0.0, 1 / 0.75]))
torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
print(calls)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[(2, 3, 40, 16), (2, 3, 40, 40)]"
    assert not done.stderr
