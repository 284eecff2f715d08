"""The fast BigBird attention computes what transformers does, in training and evaluation, with and
without padding; by flex_attention, too (on a GPU: tests/test_gpu.py). Recomputed: test_sameness.py.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import BigBirdConfig, BigBirdForSequenceClassification

from tests.faults import refusal
from toolkit.models import bigbird
from toolkit.models.bigbird import attention as ways
from toolkit.models.bigbird import gathered
from toolkit.models.head_groups import head_groups

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "sep_token_id": 2, "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


def make(training: bool = True, sharpness: float = 40, **changed: Any) -> Any:
    """A small random BigBird with attention far from uniform."""
    config = BigBirdConfig(**{**SMALL, **changed})
    model = BigBirdForSequenceClassification(config).train(training)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(sharpness)
    return model


def fast(model: Any, attention: str = "auto") -> Any:
    return bigbird.install(copy.deepcopy(model), attention)


def batch(length: int, padding: str = "none", samples: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    inputs = {"input_ids": torch.randint(3, 50, (samples, length), generator=generator)}
    if padding != "none":
        mask = torch.ones(samples, length, dtype=torch.long)
        mask[0, 0 if padding == "a whole sample" else length - length // 3 :] = 0
        mask[1, :70] = 0 if padding == "both" else 1
        inputs["attention_mask"] = mask
    return inputs


def compare(mine: Any, reference: Any, inputs: Any, forward: float, backward: float) -> None:
    """Last hidden states, and the gradients of the embedded inputs and of every weight."""
    outputs = []
    for model in (mine, reference):
        model.zero_grad()
        encoder = getattr(model, model.base_model_prefix, model)
        embedded = encoder.embeddings.word_embeddings(inputs["input_ids"]).detach().requires_grad_()
        others = {name: value for name, value in inputs.items() if name != "input_ids"}
        hidden = encoder(inputs_embeds=embedded, **others).last_hidden_state
        weights = torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)
        (hidden * weights.to(hidden)).sum().backward()
        grads = {name: each.grad for name, each in encoder.named_parameters()}
        outputs.append((hidden.detach(), {"inputs": embedded.grad, **grads}))
    (hidden, grads), (expected_hidden, expected_grads) = outputs
    torch.testing.assert_close(hidden, expected_hidden, rtol=forward, atol=forward)
    for name, expected in expected_grads.items():
        if grads[name] is None:  # of the word embeddings that pad a batch to blocks
            assert expected is None or not expected.any(), name
            continue
        scale = expected.abs().max().clamp(min=1.0).item()
        torch.testing.assert_close(
            grads[name] / scale, expected / scale, rtol=backward, atol=backward, msg=name
        )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("length", "padding", "changed"),
    [(1100, "none", {}), (705, "both", {}), (1024, "both", {}), (1024, "a whole sample", {}),
     (1152, "both", {"block_size": 32, "num_random_blocks": 1, "max_position_embeddings": 1152}),
     (4096, "right", {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1})],
)  # fmt: skip
def test_same_numbers_in_float64(length: int, padding: str, changed: Any, training: bool) -> None:
    reference = make(training=training, **changed).double()
    compare(fast(reference), reference, batch(length, padding), 1e-12, 1e-12)


@pytest.mark.parametrize(("length", "training"), [(1024, True), (1100, False)])
def test_operators_of_any_device(length: int, training: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(gathered, "_attend", gathered._plain)
    monkeypatch.setattr(gathered, "_attend_backward", gathered._plain_backward)
    monkeypatch.setattr(gathered, "_flash", None)
    reference = make(training=training).double()
    compare(fast(reference), reference, batch(length, "both"), 1e-12, 1e-12)
    positions = torch.arange(length)[None]  # in one row
    compare(fast(reference), reference, {**batch(length), "position_ids": positions}, 1e-12, 1e-12)


def test_groups_of_samples_and_heads(monkeypatch: Any) -> None:
    """3 samples of 4 heads in groups of two samples, and of one sample's 3 heads and one."""
    reference = make(num_attention_heads=4, block_size=16).double()
    for blocks, groups in ((2 * 4 * 16, 2), (3 * 16, 6)):
        monkeypatch.setattr(gathered, "_BLOCKS", blocks)
        assert len([*head_groups(3, 4, blocks // 16)]) == groups
        compare(fast(reference), reference, batch(256, "right", 3), 1e-12, 1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_a_short_batch_runs_full_and_changes_nothing(training: bool) -> None:
    reference = make(training=training)
    model = fast(reference)
    long, expected = batch(1024, "right"), reference(**batch(1024, "right")).logits
    for length in (1, 9, 64, 300, 704):
        inputs = batch(length, "right" if length > 8 else "none")
        compare(model, copy.deepcopy(reference), inputs, 1e-5, 1e-5)
    torch.testing.assert_close(model(**long).logits, expected, rtol=1e-5, atol=1e-6)
    assert model.bert.attention_type == model.config.attention_type == "block_sparse"
    full = fast(reference, "full")  # saved so: it is loaded as it was trained
    reference.bert.set_attention_type("original_full")
    compare(full, reference, batch(1101, "right"), 1e-5, 1e-5)
    assert full.config.attention_type == "original_full"


def test_no_tensor_of_size_s_times_s() -> None:
    # one head: gathered keys are (1, 60, 8 * 64, 4), scores of whole layers would be 4096 * 4096
    model = fast(make(hidden_size=4, num_attention_heads=1, num_hidden_layers=1))
    with torch.profiler.profile(profile_memory=True) as profile:
        model(**batch(4096, "right")).logits.sum().backward()
    # bytes that an operator allocates
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    assert 0 < max(sizes) <= 4 * 4096 * 8 * 64


@pytest.mark.parametrize("training", [True, False])
def test_autocast(training: bool) -> None:
    """With an error like that of transformers in bfloat16 (whose autocast crashes on a CPU)."""
    exact, inputs = make(training=training), batch(1024, "right")
    expected = exact(**inputs).logits
    theirs = (copy.deepcopy(exact).bfloat16()(**inputs).logits - expected).abs().max()
    model = fast(exact)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs).logits
    logits.float().sum().backward()
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).abs().max() <= 2 * theirs + 1e-2
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


def test_errors() -> None:
    refusal(bigbird.install, make(), "gatherd", match="did you mean gathered")
    full = make(attention_type="original_full")
    refusal(bigbird.install, full, match="attention_type='block_sparse'")


@pytest.mark.parametrize("limit", [9, 2, 0])
def test_one_shape_too_many(limit: int, monkeypatch: Any, recwarn: Any) -> None:
    """`limit` kernels can be compiled, by a backend that compiles nothing: one a shape, as on
    CUDA. Others would get dense scores from torch: theirs are gathered. By kernels: test_gpu.py."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward if limit else 1 / 0

    real, options = torch.compile, {"backend": backend, "recompile_limit": max(limit, 1)}
    monkeypatch.setattr(torch, "compile", lambda call, **more: real(call, **(more | options)))
    monkeypatch.setattr(ways, "_compiled_on", lambda device: True)
    monkeypatch.setattr(ways, "_compiles", {})
    ways._compiled.cache_clear()
    torch._dynamo.reset()
    reference = make(training=limit == 9, block_size=4, max_position_embeddings=256)
    model = fast(reference.requires_grad_(False), "flex")
    # 12 to 64 blocks, as 4096 tokens have in blocks of 64; the second time nothing is compiled
    for samples, length in 2 * [(1, 47), (2, 62), (3, 95), (4, 125), (5, 190), (6, 250), (8, 50)]:
        inputs = batch(length, "right" if samples > 1 else "none", samples)
        expected = reference(**inputs).logits
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    assert 4 < len(ways._compiles) <= 6
    compiled = sum(ways._compiles.values())
    assert compiled == min(limit, len(ways._compiles))
    assert not limit or (len(graphs) == compiled and "flex_attention" in graphs[0].code)
    assert any("no kernel" in str(each.message) for each in recwarn) == (limit < 9)
    ways._compiled.cache_clear()
    torch._dynamo.reset()
