"""Training on a CPU: attention beside its formula and torch's; dropout of the frequency of 1, by torch's generator."""

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.test_optimizer import tiny
from toolkit.features.cpu_kernels import attention as kernel
from toolkit.features.cpu_kernels.dropout import _CHUNK, bernoulli
from toolkit.utils.modules import autograd_nodes

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [(torch.bfloat16, 0.0), *((dtype, 0.25) for dtype in TOLERANCE)]


def attend(states: list[Tensor], mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """(B, nh, Q, hs)."""
    module = SimpleNamespace(is_causal=False)
    return kernel.attend(module, *states, mask, dropout)[0].transpose(1, 2)


def inputs(dtype: torch.dtype, queries: int = 24, keys: int = 24) -> list[Tensor]:
    """Query, key, value (B, nh, S, hs) in a projection's layout, and a gradient of the output."""
    torch.manual_seed(0)
    made = []
    for length in (queries, keys, keys, queries):
        states = torch.randn(3, length, 4, 16, dtype=torch.float64)
        made.append(states.transpose(1, 2).to(dtype))
    return [each.requires_grad_() for each in made[:3]] + made[3:]


def mask_of(kind: str, queries: int = 24) -> Tensor | None:
    seen = torch.arange(24) < torch.tensor([24, 15, 3])[:, None, None, None]
    shapes = {"none": None, "keys": seen, "pairs": seen.expand(-1, 1, queries, -1)}
    return seen.double().log() if kind == "added" else shapes[kind]


def nodes_of(output: Tensor) -> list[Any]:
    """The kernel's nodes in the graph of an output; none if it did not run."""
    return [node for node in autograd_nodes(output) if "_Attention" in type(node).__name__]


# groups of less than a head, and all heads at once
@pytest.mark.parametrize("scores", [300, 1 << 19])
@pytest.mark.parametrize("queries", [24, 1])
@pytest.mark.parametrize("kind", ["none", "keys", "pairs", "added"])
@pytest.mark.parametrize(("dtype", "dropout"), DTYPES)
def test_outputs_and_gradients(
    dtype: torch.dtype, dropout: float, kind: str, queries: int, scores: int, monkeypatch: Any
) -> None:
    """Also the second gradients of a graph, which `--fgm_epsilon` takes; autocast changes none. A
    share `dropout` of the probabilities is dropped."""
    monkeypatch.setattr(kernel, "_SCORES", scores)
    *states, gradient = inputs(dtype, queries)
    mask = mask_of(kind, queries)
    context = attend(states, mask.to(dtype) if kind == "added" else mask, dropout)
    drops = nodes_of(context)[0].saved_tensors[3].signbit()
    deviation = (dropout * (1 - dropout) / drops.numel()) ** 0.5
    assert abs(drops.double().mean() - dropout) <= 4 * deviation
    grads = torch.autograd.grad(context, states, gradient, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        again = torch.autograd.grad(context, states, gradient)
    assert all(map(torch.equal, grads, again))
    query, key, value = exact = [each.detach().double().requires_grad_() for each in states]
    bias = torch.zeros(1) if mask is None else mask if kind == "added" else mask.double().log()
    probabilities = (0.25 * query @ key.mT + bias).softmax(-1)
    expected = (probabilities * ~drops / (1 - dropout)) @ value
    wanted = expected, *torch.autograd.grad(expected, exact, gradient.double())
    for ours, theirs in zip((context, *grads), wanted, strict=True):
        assert (ours - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_seed_decides_with_and_without_gradients(dtype: torch.dtype) -> None:
    """Without them in the first pass of a reentrant checkpoint. A row that hides all keys is finite."""
    *states, gradient = inputs(dtype)
    seen = torch.ones(3, 1, 1, 24, dtype=torch.bool)
    seen[0] = False
    for mask in (None, seen, seen.to(dtype).log()):
        contexts = []
        for seed, gradients in ((1, True), (1, False), (2, True)):
            torch.manual_seed(seed)
            with torch.set_grad_enabled(gradients):
                contexts.append(attend(states, mask, 0.1))
        assert torch.equal(contexts[0], contexts[1])
        assert not torch.equal(contexts[0], contexts[2])
        for each in (contexts[0], *torch.autograd.grad(contexts[0], states, gradient)):
            assert each.isfinite().all()


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "modernbert", "albert"])
def test_each_layer_of_a_model_in_training_has_it(model_type: str) -> None:
    """A learned bias would get no gradient: torch's attention takes it."""
    model: Any = tiny(model_type)
    kernel.install()
    ids, mask = torch.arange(3, 15).view(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.train()(input_ids=ids, attention_mask=mask).logits
    assert len(nodes_of(logits)) == model.config.num_hidden_layers
    with torch.no_grad():
        assert model.eval()(input_ids=ids, attention_mask=mask).logits.grad_fn is None
    learned = torch.zeros(1, 4, 24, 24, requires_grad=True)
    assert nodes_of(attend(inputs(torch.float32)[:3], learned, 0.1)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-4])
def test_frequency_and_independence(dtype: torch.dtype, p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    empty = torch.empty(4 * _CHUNK + 3, dtype=dtype)
    drawn, other = (bernoulli(empty.clone(), p, generator=generator).float() for _ in range(2))
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    deviation = math.sqrt(p * (1 - p) / len(drawn))
    assert abs(drawn.mean() - p) < 4 * deviation + 2**-17
    for distance in (1, 2, 4, _CHUNK):  # 1 to 3: drawn from the same 64 bits
        both = (drawn[distance:] * drawn[:-distance]).mean()
        assert abs(both - p * p) < 5 * deviation + 2**-16
    assert not torch.equal(drawn, other)
    again = bernoulli(empty, p, generator=generator.manual_seed(1)).float()
    assert torch.equal(again, drawn)


def test_other_shapes_and_probabilities() -> None:
    transposed = torch.full((300, 500), 7.0).t()
    assert set(bernoulli(transposed, 0.3).unique().tolist()) == {0.0, 1.0}
    assert bernoulli(torch.empty(0), 0.3).shape == (0,)
    for p, expected in ((0.0, 0.0), (1.0, 1.0), (1 - 1e-9, 1.0)):
        assert bernoulli(torch.empty(9), p).mean() == expected


CODE = """
import warnings
warnings.simplefilter("error")
import torch
from unittest.mock import patch
from toolkit.features.cpu_kernels import dropout
with patch.object(dropout, "bernoulli", wraps=dropout.bernoulli) as calls:
    dropout.install()
    dropout.install()
x = torch.ones(2, 3, 40, 16, requires_grad=True)
kept = torch.nn.Dropout(0.25)(x)
kept.sum().backward()
assert torch.equal(x.grad, kept) and torch.allclose(kept.unique(), torch.tensor([0.0, 1 / 0.75]))
torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
assert [tuple(call.args[0].shape) for call in calls.mock_calls] == [(2, 3, 40, 16), (2, 3, 40, 40)]
"""


def test_every_dropout_uses_it() -> None:
    """In a separate process, since it stays installed."""
    subprocess.run([sys.executable, "-c", CODE], check=True)
