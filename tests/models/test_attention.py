"""Fewer casts under autocast (toolkit/models/attention.py): the same outputs, and gradients as close to fp32."""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

from toolkit.models.attention import share_casts

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
IDS = torch.randint(3, 50, (4, 16), generator=torch.Generator().manual_seed(0))


class CastCounter(TorchDispatchMode):
    """Counts conversions of hidden states (4, 16, 32) from float32 to bf16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].shape == (4, 16, 32):
            self.count += args[0].dtype == torch.float32 and output.dtype == torch.bfloat16
        return output


def logits_and_gradient(
    model: torch.nn.Module, bf16: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=IDS).logits
    logits.float().square().sum().backward()
    return logits.detach(), torch.cat(
        [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    )


def test_each_layer_casts_its_input_once() -> None:
    torch.manual_seed(0)
    plain = BertForSequenceClassification(BertConfig(**SIZES))
    model = copy.deepcopy(plain)
    share_casts(model)
    counts = []
    for each in (plain, model):
        with CastCounter() as counter:
            each(input_ids=IDS)
            assert counter.count == 0  # no autocast
            with torch.autocast("cpu", torch.bfloat16):
                each(input_ids=IDS)
        counts.append(counter.count)
    assert counts[0] - counts[1] == 2 * 2  # key's and value's in two layers
    exact, (expected, before), (logits, gradient) = (
        logits_and_gradient(plain, bf16=False)[1], logits_and_gradient(plain), logits_and_gradient(model)
    )  # fmt: skip
    assert torch.equal(logits, expected)
    assert not torch.equal(gradient, before)
    assert (gradient - exact).norm() < 1.1 * (before - exact).norm()
    assert torch.equal(logits_and_gradient(model, bf16=False)[1], exact)


def test_an_input_that_is_added_to_the_output_stays_in_fp32() -> None:
    torch.manual_seed(0)
    config = AlbertConfig(**SIZES, embedding_size=16, classifier_dropout_prob=0.0)
    model = AlbertForSequenceClassification(config)
    expected = logits_and_gradient(model)
    share_casts(model)
    for mine, theirs in zip(logits_and_gradient(model), expected, strict=True):
        assert torch.equal(mine, theirs)
