"""The fast BigBird attention by flex_attention (on a GPU: tests/test_gpu.py)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.models.test_bigbird import _seeded, batch, fast, make
from toolkit.models.bigbird import attention as ways
from toolkit.models.bigbird.plan import few_widths

__all__ = ["_seeded"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("length", "padding"), [(1024, "right"), (1100, "none")])
def test_flex_attention_uncompiled(length: int, padding: str, training: bool) -> None:
    """Its forward pass on a CPU: the same block mask, counts and biases as on CUDA, computed densely."""
    reference = make(training=training).double().requires_grad_(False)
    inputs = batch(length, padding)
    expected = reference.bert(**inputs).last_hidden_state
    torch.testing.assert_close(
        fast(reference, "flex").bert(**inputs).last_hidden_state, expected, rtol=1e-12, atol=1e-12
    )


def test_more_than_8_shapes_are_compiled_each_once_and_one_too_many_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never dense scores, as torch would compute by default from the ninth shape on."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: real(function, backend=backend, **given))
    monkeypatch.setattr(ways, "_MOST_SHAPES", 12)
    kernel, given = ways._compiled.__wrapped__(), []

    def noted(*tensors: torch.Tensor, **options: Any) -> Any:
        given.append(tensors[0].shape)
        return kernel(*tensors, **options)

    monkeypatch.setattr(ways, "_kernel", lambda device: noted)
    torch._dynamo.reset()
    reference = make(block_size=16, max_position_embeddings=1024, num_hidden_layers=1, training=False)
    model = fast(reference.requires_grad_(False), "flex")
    for _ in range(2):  # a shape that comes again is not compiled again
        for samples, length in [(1, 190), (2, 250), (3, 380), (4, 500), (5, 760), (6, 1000), (8, 200)]:
            inputs = batch(length, "right" if samples > 1 else "none", samples=samples)
            torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert {shape[0] for shape in given} == {1, 2, 4, 8}  # whatever the number of samples
    assert {shape[2] for shape in given} == {192, 256, 384, 512, 768, 1024}  # ... and of tokens
    assert len({few_widths(blocks) for blocks in range(12, 65)}) == 6  # 768 to 4096 tokens in blocks of 64
    assert 8 < len(set(given)) == len(graphs) < len(given)
    assert all("flex_attention" in graph.code for graph in graphs)
    left = [torch.ones(3, 1, 1, width, 16) for width in range(16, 16 * 14, 16)]
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        list(itertools.starmap(kernel, left))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_flex_attention_compiled(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel alone, as CUDA runs it: inside a compiled model torch 2.13 finds no choice for it on a CPU."""
    monkeypatch.setattr(ways, "_kernel", lambda device: ways._compiled())
    reference = make(training=training, hidden_size=32, num_hidden_layers=1).requires_grad_(False)
    model = fast(reference, "flex")
    for length in (1024, 1152):
        inputs = batch(length, "right")
        torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
