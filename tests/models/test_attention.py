"""Fewer casts under autocast (toolkit/models/attention.py): the same outputs, and gradients as close to fp32."""

import copy
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.test_optimizer import tiny
from toolkit.models.attention import share_casts

IDS = torch.randint(3, 30, (4, 16), generator=torch.Generator().manual_seed(0))


class CastCounter(TorchDispatchMode):
    """Counts conversions of hidden states (B, S, H) from float32 to bf16."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].ndim == 3:
            self.count += args[0].dtype == torch.float32 and output.dtype == torch.bfloat16
        return output


def pair(family: str) -> tuple[Any, Any]:
    """A model, and its copy with shared casts."""
    torch.manual_seed(0)
    plain = tiny(family).eval()
    model = copy.deepcopy(plain)
    share_casts(model)
    return plain, model


def outputs_of(model: Any, bf16: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits and the gradient of all weights."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=IDS).logits
    logits.float().square().sum().backward()
    grads = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return logits.detach(), torch.cat(grads)


def test_each_layer_casts_its_input_once() -> None:
    plain, model = pair("bert")
    counts = []
    for each in (plain, model):
        with CastCounter() as counter:
            each(input_ids=IDS)
            assert counter.count == 0  # no autocast
            with torch.autocast("cpu", torch.bfloat16):
                each(input_ids=IDS)
        counts.append(counter.count)
    assert counts[0] - counts[1] == 2 * 2  # key's and value's in two layers
    (expected, before), (logits, gradient) = outputs_of(plain), outputs_of(model)
    exact = outputs_of(plain, bf16=False)[1]
    assert torch.equal(logits, expected)
    assert not torch.equal(gradient, before)
    assert (gradient - exact).norm() < 1.1 * (before - exact).norm()
    assert torch.equal(outputs_of(model, bf16=False)[1], exact)


def test_an_input_that_is_added_to_the_output_stays_in_fp32() -> None:
    plain, model = pair("albert")
    assert all(map(torch.equal, outputs_of(model), outputs_of(plain)))
