"""The fast BigBird attention by flex_attention (on a GPU: tests/test_gpu.py)."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor.virtualized import V

from tests.models.test_bigbird import _seeded, batch, compare, fast, make
from toolkit.models.bigbird import attention as ways
from toolkit.models.bigbird import plan

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


def small(training: bool = False) -> Any:
    """With 12 to 64 blocks of 4 tokens, as many as for 4096 tokens in blocks of 64."""
    sizes: dict[str, Any] = {
        "block_size": 4,
        "max_position_embeddings": 256,
        "num_hidden_layers": 2,
    }
    return make(training=training, **sizes).requires_grad_(False)


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
        reference = small(training)
        model = fast(reference, "flex")
        for _ in range(2):  # the second time nothing is compiled, in any layer
            for samples, length in BATCHES:
                assert_same(model, reference, samples, length)
    shapes = {shape[0] for shape in ways._compiles}
    assert {shape[0] for shape in shapes} == {1, 4}  # for any number of samples
    assert {shape[2] for shape in shapes} == {64, 128, 256}  # ... and of tokens
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
    reference = small()
    model = fast(reference, "flex")
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


def test_backward_tiles_divide_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch drops the kernel, and gathered attention would take over on such GPUs."""
    gpus = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    with ways._backward_tiles():
        choices = V.choices
        for capability, size, dtype in itertools.product(gpus, (32, 64, 128), dtypes):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, gpu=capability: gpu)
            (config,) = choices.get_flex_attention_bwd_configs(size, dtype)
            tiles = config.block_m1, config.block_n1, config.block_m2, config.block_n2
            assert not any(ways.TILE % tile for tile in tiles)
            # as the kernel requires
            assert config.block_n1 % config.block_m1 == config.block_m2 % config.block_n2 == 0
    assert V.choices is not choices


def test_tables_of_a_mask_are_contiguous() -> None:
    """The kernels on CUDA read rows of them by address; those of other strides gave wrong gradients."""
    pattern = plan.Pattern(0, 2, 64, 3, 4096, 1088, True)
    blocks = ways.mask_of(pattern, torch.device("cpu"), torch.float32).blocks
    for name in ("kv", "full_kv", "q", "full_q"):
        for table in ("num_blocks", "indices"):
            assert getattr(blocks, f"{name}_{table}").is_contiguous(), (name, table)
