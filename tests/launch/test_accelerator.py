"""toolkit/launch/accelerator.py: the norm that gradients are clipped by is exact on a CPU, so that it is the same for
shards. (Promise 1; tests/test_sameness.py compares it under each strategy.)"""

import pytest
import torch

from toolkit.launch.accelerator import CPUAccelerator


@pytest.mark.parametrize("largest", [0.5, 1e9])
def test_the_norm_of_a_large_embedding(largest: float, no_launcher: None) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in ((40_000, 300), (7,), (3,))]
    for each in parameters[:2]:  # one is not used
        each.grad = 1e-3 * torch.randn_like(each)
    before = torch.cat([each.grad.flatten() for each in parameters[:2]]).double()
    norm = CPUAccelerator(cpu=True).clip_grad_norm_(parameters, largest)
    assert float(norm) == pytest.approx(before.norm().item(), rel=1e-7)
    assert float(torch.nn.utils.get_total_norm([before.float()])) != pytest.approx(norm, rel=1e-6)
    after = torch.cat([each.grad.flatten() for each in parameters[:2]]).double()
    assert after.norm().item() == pytest.approx(min(norm, largest), rel=1e-5)
