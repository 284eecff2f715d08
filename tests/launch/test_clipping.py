"""Promise 1, its norm: gradients are clipped by the exact norm on a CPU, so that it is the same for
shards. (tests/test_sameness.py compares it under each strategy.)"""

import math

import pytest
import torch

from toolkit.launch.accelerator import Accelerator


@pytest.mark.parametrize("largest", [0.5, 1e9, math.inf])
def test_the_norm_of_a_large_embedding(largest: float, no_launcher: None) -> None:
    torch.manual_seed(0)
    sizes = ((40_000, 300), (7,), (), (3,))
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for each in parameters[:3]:  # one is not used
        each.grad = 1e-3 * torch.randn_like(each)
    before = torch.cat([each.grad.flatten() for each in parameters[:3]]).double()
    norm = Accelerator(cpu=True).clip_grad_norm_(parameters, largest)
    assert float(norm) == pytest.approx(before.norm().item(), rel=1e-8)
    assert float(before.float().norm()) != pytest.approx(float(norm), rel=1e-5)
    after = torch.cat([each.grad.flatten() for each in parameters[:3]]).double()
    assert after.norm().item() == pytest.approx(min(float(norm), largest), rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_torchs(bad: float, no_launcher: None) -> None:
    ours, theirs = (torch.nn.Parameter(torch.zeros(4, 2)) for _ in range(2))
    for each in (ours, theirs):
        each.grad = torch.ones(4, 2)
        each.grad[1, 1] = bad
    norm = Accelerator(cpu=True).clip_grad_norm_(iter([ours]), 1.0)
    assert str(float(norm)) == str(float(torch.nn.utils.clip_grad_norm_([theirs], 1.0)))
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)
