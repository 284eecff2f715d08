"""The attention of training on a CPU, beside its formula and torch's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.training.test_optimizer import tiny
from toolkit.features.cpu_attention import kernel
from toolkit.utils.modules import autograd_nodes

ALONE = SimpleNamespace(is_causal=False)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """(B, nh, Q, hs)."""
    output, _ = kernel.attend(ALONE, query, key, value, mask, dropout, scale)
    return output.transpose(1, 2)


def inputs(dtype: torch.dtype, queries: int = 24, keys: int = 24) -> list[Tensor]:
    """Query, key, value (B, nh, S, hs) in the layout of a projection, and a gradient of the output."""
    torch.manual_seed(0)
    lengths = (queries, keys, keys, queries)
    states = [
        torch.randn(3, length, 4, 16, dtype=torch.float64).transpose(1, 2).to(dtype)
        for length in lengths
    ]
    return [each.requires_grad_() for each in states[:3]] + states[3:]


def mask_of(kind: str, queries: int = 24, keys: int = 24) -> Tensor | None:
    seen = torch.arange(keys) < torch.tensor([keys, 15, 3])[:, None, None, None]
    shapes = {"none": None, "keys": seen, "pairs": seen.expand(-1, 1, queries, -1)}
    return seen.double().log() if kind == "added" else shapes[kind]


def node_of(context: Tensor) -> Any:
    """The kernel's node in the graph of an output; None if it did not run."""
    return next(
        (node for node in autograd_nodes(context) if "_Attention" in type(node).__name__), None
    )


def signed_probabilities(context: Tensor) -> Tensor:
    return node_of(context).saved_tensors[3]


@pytest.mark.parametrize(
    "scores", [300, 1 << 19]
)  # groups of less than a head, and all heads at once
@pytest.mark.parametrize("queries", [24, 1])
@pytest.mark.parametrize("kind", ["none", "keys", "pairs", "added"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_outputs_and_gradients_with_dropout(
    dtype: torch.dtype, kind: str, queries: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_SCORES", scores)
    *states, gradient = inputs(dtype, queries)
    mask = mask_of(kind, queries)
    mask = mask.to(dtype) if mask is not None and kind == "added" else mask
    context = attend(*states, mask, 0.25, 0.3)
    remain = ~signed_probabilities(context).signbit()
    grads = torch.autograd.grad(context, states, gradient)
    query, key, value = exact = [each.detach().double().requires_grad_() for each in states]
    scores_of = 0.3 * query @ key.mT
    if mask is not None:
        scores_of = (
            scores_of + mask if kind == "added" else scores_of.masked_fill(~mask, -torch.inf)
        )
    expected = (scores_of.softmax(-1) * remain / 0.75) @ value
    for ours, theirs in zip(
        (context, *grads),
        (expected, *torch.autograd.grad(expected, exact, gradient.double())),
        strict=True,
    ):
        assert (ours - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_graph_has_two_gradients(dtype: torch.dtype) -> None:
    """`--fgm_epsilon` takes them."""
    *states, gradient = inputs(dtype)
    context = attend(*states, None, 0.25)
    first = torch.autograd.grad(context, states, gradient, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):  # does not change them
        second = torch.autograd.grad(context, states, gradient)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5])
def test_each_probability_is_dropped_as_often_as_the_others(probability: float) -> None:
    torch.manual_seed(0)
    query = torch.zeros(64, 4, 32, 8, dtype=torch.bfloat16, requires_grad=True)
    drops = signed_probabilities(attend(query, query, query, None, probability)).signbit()
    rates = drops.double().mean(0).flatten()  # (nh Q K,), of 64 samples
    deviation = (probability * (1 - probability)) ** 0.5
    assert abs(rates.mean() - probability) < 4 * deviation / drops.numel() ** 0.5
    assert rates.std() == pytest.approx(deviation / 8, rel=0.1)
    neighbours = torch.corrcoef(
        torch.stack([drops[..., :-1].flatten().double(), drops[..., 1:].flatten().double()])
    )
    assert neighbours[0, 1].abs() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_seed_decides_with_and_without_gradients(dtype: torch.dtype) -> None:
    """Without them in the first pass of a reentrant checkpoint."""
    *states, _ = inputs(dtype)
    contexts = []
    for seed, gradients in ((1, True), (1, False), (2, True)):
        torch.manual_seed(seed)
        with torch.set_grad_enabled(gradients):
            contexts.append(attend(*states, None, 0.1))
    assert torch.equal(contexts[0], contexts[1])
    assert not torch.equal(contexts[0], contexts[2])


def test_recomputed_activations_have_the_same_dropout() -> None:
    *states, gradient = inputs(torch.float32)
    grads = []
    for compute in (
        attend,
        lambda *args: checkpoint(attend, *args, use_reentrant=False),
    ):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(compute(*states, None, 0.1), states, gradient))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("hidden", [False, -torch.inf])
def test_a_row_that_hides_all_keys_is_finite(hidden: float) -> None:
    *states, gradient = inputs(torch.bfloat16)
    mask = torch.full(
        (3, 1, 1, 24), hidden is False, dtype=torch.bool if hidden is False else torch.bfloat16
    )
    mask[0] = hidden
    context = attend(*states, mask, 0.1)
    assert all(
        each.isfinite().all() for each in (context, *torch.autograd.grad(context, states, gradient))
    )


def test_half_precision_without_dropout_equals_torchs() -> None:
    *states, gradient = inputs(torch.bfloat16)
    mask = mask_of("keys")
    ours = attend(*states, mask)
    theirs = F.scaled_dot_product_attention(*states, mask)
    assert node_of(ours)
    assert (ours - theirs).norm() < 1e-2 * theirs.norm()
    for each, other in zip(
        *(torch.autograd.grad(out, states, gradient) for out in (ours, theirs)), strict=True
    ):
        assert (each - other).norm() < 2e-2 * other.norm()


def test_others_are_torchs() -> None:
    *states, _ = inputs(torch.float32)
    learned = torch.zeros(1, 4, 24, 24, requires_grad=True)
    with torch.no_grad():
        evaluated = attend(*states, None, 0.0)
    assert torch.equal(evaluated, F.scaled_dot_product_attention(*states))
    for mask, dropout in ((learned, 0.1), (None, 0.0), (None, 1.0)):
        context = attend(*states, mask, dropout)
        assert node_of(context) is None


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "modernbert", "albert"])
def test_each_layer_of_a_model_in_training_has_it(model_type: str) -> None:
    model: Any = tiny(model_type)
    kernel.install()
    ids, mask = torch.arange(3, 15).view(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.train()(input_ids=ids, attention_mask=mask).logits
    kernels = [node for node in autograd_nodes(logits) if "_Attention" in type(node).__name__]
    assert len(kernels) == model.config.num_hidden_layers
    with torch.no_grad():
        assert model.eval()(input_ids=ids, attention_mask=mask).logits.grad_fn is None
