"""toolkit/training/average.py: the moving average of the weights."""

import copy

import torch

from toolkit.checkpoint.state import LiveState
from toolkit.training.average import Average, average_as_weights


def test_weights_and_average_are_swapped_bit_for_bit() -> None:
    """And the optimizer, which stores the average in its state, steps as without it."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    plain = copy.deepcopy(module)
    state = LiveState(module, torch.optim.AdamW(module.parameters(), lr=0.1), torch.device("cpu"))
    averaged = None
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    average, expected = Average(lambda: state, 0.7), None
    for step in range(1, 30):
        for model, optimizer in ((module, state.optimizer), (plain, other)):
            optimizer.zero_grad()
            bias = model.bias if step > 5 else None  # has no gradient at first
            torch.nn.functional.linear(
                torch.full((1, 3), float(step)), model.weight, bias
            ).square().sum().backward()
            optimizer.step()
        average.update(step)
        weight = plain.weight.detach()
        decay = min(0.7, (1 + step) / (10 + step))
        expected = weight.clone() if expected is None else decay * expected + (1 - decay) * weight
        with average_as_weights(lambda: state):
            torch.testing.assert_close(module.weight, expected)
            averaged = module.weight.detach().clone()
        assert torch.equal(module.weight, plain.weight)
    assert not torch.allclose(averaged, module.weight)
