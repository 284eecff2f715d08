"""The fast BigBird attention by flex_attention (on a GPU: tests/test_gpu.py)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.models.test_bigbird import _seeded, batch, compare, fast, make
from toolkit.models.bigbird import attention as ways

__all__ = ["_seeded"]


@pytest.mark.parametrize(("block", "length", "training"), [(64, 1024, True), (16, 275, False)])
def test_flex_attention_uncompiled(block: int, length: int, training: bool) -> None:
    """On a CPU: the same block mask, repeats and biases as on CUDA, computed densely. In both cases some query blocks
    read a key block more than once."""
    reference = make(training=training, block_size=block).double().requires_grad_(False)
    inputs = batch(length, "right" if training else "none")
    expected = reference.bert(**inputs).last_hidden_state
    states = fast(reference, "flex").bert(**inputs).last_hidden_state
    torch.testing.assert_close(states, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The compiled graphs, run by a backend that compiles nothing; as on CUDA each shape is one graph."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: real(function, **{"backend": backend, **options}),
    )
    monkeypatch.setattr(ways, "_compiled_on", lambda device: True)
    monkeypatch.setattr(ways, "_compiles", {})
    ways._compiled.cache_clear()
    torch._dynamo.reset()
    yield graphs
    ways._compiled.cache_clear()
    torch._dynamo.reset()


BATCHES = [(1, 47), (2, 62), (3, 95), (4, 125), (5, 190), (6, 250), (8, 50)]


def small(training: bool = False) -> tuple[Any, Any]:
    """A model, and its copy with flex attention: with 12 to 64 blocks of 4 tokens, as many as for 4096 tokens in blocks
    of 64."""
    reference = make(training=training, block_size=4, max_position_embeddings=256)
    return reference.requires_grad_(False), fast(reference, "flex")


def assert_same(model: Any, reference: Any, samples: int, length: int) -> None:
    inputs = batch(length, "right" if samples > 1 else "none", samples=samples)
    torch.testing.assert_close(
        model(**inputs).logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5
    )


def test_few_shapes_are_compiled_each_once(
    compiled: list[Any], recwarn: pytest.WarningsRecorder
) -> None:
    """And never dense scores, which torch computes by default from the ninth shape on."""
    for training in (False, True):
        reference, model = small(training)
        for _ in range(2):  # the second time nothing is compiled, in any layer
            for samples, length in BATCHES:
                assert_same(model, reference, samples, length)
    samples, _, tokens, _ = zip(*(shape[0] for shape in ways._compiles), strict=True)
    assert (set(samples), set(tokens)) == ({1, 4}, {64, 128, 256})  # for any numbers
    # evaluation always adds repeats to scores, training only with padding
    assert len(compiled) == len(ways._compiles) == sum(ways._compiles.values()) <= 2 * 3 * 2
    assert all("flex_attention" in graph.code for graph in compiled)
    assert not [each for each in recwarn if "flex_attention has no kernel" in str(each.message)]


@pytest.mark.parametrize("limit", [2, 0])
def test_one_shape_too_many_is_gathered(
    limit: int,
    compiled: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """`limit` kernels can be compiled."""
    real = torch.compile
    more = {"recompile_limit": limit} if limit else {"backend": lambda *_: 1 / 0}
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: real(function, **{**options, **more})
    )
    reference, model = small()
    for samples, length in 2 * BATCHES:
        assert_same(model, reference, samples, length)
    assert len(compiled) == sum(ways._compiles.values()) == limit
    assert len(ways._compiles) > 4
    assert any("no kernel" in str(each.message) for each in recwarn)


def test_a_backward_kernel_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled in the forward pass, where gathered attention can still take over."""
    from torch._dynamo.backends.common import aot_autograd

    def broken(*_: Any) -> Any:
        raise RuntimeError("no valid choice")

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Any, mask: Any
    ) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=broken)
    monkeypatch.setattr(
        ways, "_compiled", lambda: torch.compile(attend, backend=backend, fullgraph=True)
    )
    monkeypatch.setattr(ways, "_compiled_on", lambda device: True)
    monkeypatch.setattr(ways, "_compiles", {})
    reference = make(num_hidden_layers=1)
    with pytest.warns(UserWarning, match="no valid choice"):
        compare(fast(reference, "flex"), reference, batch(1024, "right"), 1e-4, 1e-4)
    torch._dynamo.reset()
