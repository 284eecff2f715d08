"""The dropout of training on a CPU: the frequency of 1, reproducible by torch's generator, used by every dropout."""

import math
import subprocess
import sys

import pytest
import torch

from toolkit.features.cpu_kernels.dropout import _CHUNK, bernoulli


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-4])
def test_frequency_and_independence(dtype: torch.dtype, p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    empty = torch.empty(4 * _CHUNK + 3, dtype=dtype)
    drawn = bernoulli(empty, p, generator=generator).float()
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    deviation = math.sqrt(p * (1 - p) / len(drawn))
    assert abs(drawn.mean() - p) < 4 * deviation + 2**-17
    for distance in (1, 2, 4, _CHUNK):  # 1 to 3: drawn from the same 64 bits
        both = (drawn[distance:] * drawn[:-distance]).mean()
        assert abs(both - p * p) < 5 * deviation + 2**-16


def test_seeds_shapes_and_probabilities() -> None:
    generator = torch.Generator().manual_seed(7)
    first, second = (bernoulli(torch.empty(1000), generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(bernoulli(torch.empty(1000), generator=generator.manual_seed(7)), first)
    transposed = torch.full((300, 500), 7.0).t()
    assert set(bernoulli(transposed, 0.3).unique().tolist()) == {0.0, 1.0}
    assert abs(transposed.mean() - 0.3) < 0.01
    assert bernoulli(torch.empty(0), 0.3).shape == (0,)
    for p, expected in ((0.0, 0.0), (1.0, 1.0), (1 - 1e-9, 1.0)):
        assert bernoulli(torch.empty(9), p).mean() == expected
    with pytest.raises(RuntimeError, match="p=1"):
        bernoulli(torch.empty(2), 1.1)


CODE = """
import warnings
warnings.simplefilter("error")
import torch
from toolkit.features.cpu_kernels import dropout
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


def test_every_dropout_uses_it() -> None:
    """In a separate process, since it stays installed."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[(2, 3, 40, 16), (2, 3, 40, 40)]", "")
