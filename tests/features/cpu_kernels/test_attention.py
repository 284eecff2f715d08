"""The attention of training on a CPU, beside its formula and torch's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.test_optimizer import tiny
from toolkit.features.cpu_kernels import attention as kernel
from toolkit.utils.modules import autograd_nodes

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


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


def dropped(context: Tensor) -> Tensor:
    return nodes_of(context)[0].saved_tensors[3].signbit()


# groups of less than a head, and all heads at once
@pytest.mark.parametrize("scores", [300, 1 << 19])
@pytest.mark.parametrize("queries", [24, 1])
@pytest.mark.parametrize("kind", ["none", "keys", "pairs", "added"])
@pytest.mark.parametrize(
    ("dtype", "dropout"), [*((dtype, 0.25) for dtype in TOLERANCE), (torch.bfloat16, 0.0)]
)
def test_outputs_and_gradients(
    dtype: torch.dtype,
    dropout: float,
    kind: str,
    queries: int,
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the second gradients of a graph, which `--fgm_epsilon` takes; autocast changes none."""
    monkeypatch.setattr(kernel, "_SCORES", scores)
    *states, gradient = inputs(dtype, queries)
    mask = mask_of(kind, queries)
    context = attend(states, mask.to(dtype) if kind == "added" else mask, dropout)
    remain = ~dropped(context) / (1 - dropout)
    grads = torch.autograd.grad(context, states, gradient, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        again = torch.autograd.grad(context, states, gradient)
    assert all(map(torch.equal, grads, again))
    query, key, value = exact = [each.detach().double().requires_grad_() for each in states]
    bias = torch.zeros(1) if mask is None else mask if kind == "added" else mask.double().log()
    expected = ((0.25 * query @ key.mT + bias).softmax(-1) * remain) @ value
    wanted = expected, *torch.autograd.grad(expected, exact, gradient.double())
    for ours, theirs in zip((context, *grads), wanted, strict=True):
        assert (ours - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5])
def test_each_probability_is_dropped_as_often_as_the_others(probability: float) -> None:
    torch.manual_seed(0)
    query = torch.zeros(64, 4, 32, 8, dtype=torch.bfloat16, requires_grad=True)
    drops = dropped(attend([query] * 3, None, probability)).double()
    rates = drops.mean(0).flatten()  # (nh Q K,), of 64 samples
    deviation = (probability * (1 - probability)) ** 0.5
    assert abs(rates.mean() - probability) < 4 * deviation / drops.numel() ** 0.5
    assert rates.std() == pytest.approx(deviation / 8, rel=0.1)
    neighbours = torch.stack([drops[..., :-1].flatten(), drops[..., 1:].flatten()])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_seed_decides_with_and_without_gradients(dtype: torch.dtype) -> None:
    """Without them in the first pass of a reentrant checkpoint."""
    *states, _ = inputs(dtype)
    contexts = []
    for seed, gradients in ((1, True), (1, False), (2, True)):
        torch.manual_seed(seed)
        with torch.set_grad_enabled(gradients):
            contexts.append(attend(states, None, 0.1))
    assert torch.equal(contexts[0], contexts[1])
    assert not torch.equal(contexts[0], contexts[2])


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_row_that_hides_all_keys_is_finite(is_bool: bool) -> None:
    *states, gradient = inputs(torch.bfloat16)
    mask = torch.ones(3, 1, 1, 24, dtype=torch.bool)
    mask[0] = False
    context = attend(states, mask if is_bool else mask.to(torch.bfloat16).log(), 0.1)
    for each in (context, *torch.autograd.grad(context, states, gradient)):
        assert each.isfinite().all()


def test_others_are_torchs() -> None:
    *states, _ = inputs(torch.float32)
    learned = torch.zeros(1, 4, 24, 24, requires_grad=True)
    with torch.no_grad():
        evaluated = attend(states)
    assert torch.equal(evaluated, F.scaled_dot_product_attention(*states))
    for mask, dropout in ((learned, 0.1), (None, 0.0)):
        assert nodes_of(attend(states, mask, dropout)) == []


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "modernbert", "albert"])
def test_each_layer_of_a_model_in_training_has_it(model_type: str) -> None:
    model: Any = tiny(model_type)
    kernel.install()
    ids, mask = torch.arange(3, 15).view(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.train()(input_ids=ids, attention_mask=mask).logits
    assert len(nodes_of(logits)) == model.config.num_hidden_layers
    with torch.no_grad():
        assert model.eval()(input_ids=ids, attention_mask=mask).logits.grad_fn is None
