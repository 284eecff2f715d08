"""toolkit/training/average.py: a moving average that changes places with the weights."""

from __future__ import annotations

import copy

import torch

from toolkit.checkpoint.live import LiveState
from toolkit.training.average import Average


def test_weights_and_their_average_change_places_to_the_bit() -> None:
    """And the optimizer, whose state it is kept in, steps as without it."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    plain = copy.deepcopy(module)
    state, others = LiveState(module, torch.optim.AdamW(module.parameters(), lr=0.1)), None
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    average, expected = Average(lambda: state, 0.7), None
    for step in range(1, 30):
        for model, optimizer in ((module, state.optimizer), (plain, other)):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(step))).square().sum().backward()
            optimizer.step()
        average.update(step)
        weight = plain.weight.detach()
        decay = min(0.7, (1 + step) / (10 + step))
        expected = weight.clone() if expected is None else decay * expected + (1 - decay) * weight
        with average.as_weights(step):
            torch.testing.assert_close(module.weight, expected)
            others = module.weight.detach().clone()
        assert torch.equal(module.weight, plain.weight)
    assert not torch.allclose(others, module.weight)
