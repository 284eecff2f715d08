"""Every kind of model and optimizer resumes exactly in one process; what does not fit is refused by name, before
anything is changed. (Promise 4.) Across strategies: tests/checkpoint/test_elastic_state.py."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.checkpoint import states
from tests.checkpoint.states import Counting, Odd, State, accelerator_of, assert_same
from tests.faults import refusal
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.state import LiveState
from toolkit.checkpoint.strategies import live_state


class Awkward(Odd):
    """With frozen, scalar, 16-bit and shared tensors, too."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = self.embed  # a module under two names
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.brief = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("wide", torch.randn(2, dtype=torch.float64))
        self.one, self.two = nn.Module(), nn.Module()
        shared = torch.arange(6)
        self.one.register_buffer("table", shared)
        self.two.register_buffer("table", shared)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scalar + (self.brief.float() ** 3).sum()


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """Counts its steps in Python, as DeepSpeed's, whose kernel takes no tensor."""

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            assert type(state["step"]) is int
            state["step"] = torch.tensor(float(state["step"]))
        super().step(closure)
        for state in self.state.values():
            state["step"] = int(state["step"])


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **states.OPTIMIZERS,
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.01),
    "transformers": functools.partial(transformers.Adafactor, lr=0.01, relative_step=False),
    "deepspeed": functools.partial(DeepSpeedCPUAdam, lr=0.01),
}


def started(name: str = "adamw", steps: int = 3, kind: type[Odd] = Odd, seed: int = 3) -> LiveState:
    torch.manual_seed(seed)
    model = kind()
    trained = [each for each in model.parameters() if each.requires_grad]
    live = live_state(accelerator_of(), model, MAKERS[name](trained))
    for step in range(steps):
        take_step(live, step)
    return live


def take_step(live: LiveState, step: int) -> float:
    tokens = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(step))
    loss = live.module(tokens)
    live.optimizer.zero_grad()
    loss.backward()
    live.optimizer.step()
    return loss.item()


def next_losses(live: LiveState) -> list[float]:
    return [take_step(live, step) for step in range(3, 6)]


def snapshot(live: LiveState) -> State:
    weights = {name: tensor.clone() for name, tensor in live.module.state_dict().items()}
    return weights | {each.name: each.values.clone() for each in live.moments()}


def load(live: LiveState, folder: Path) -> None:
    folders.load(folder, live, folders.read_state(folder))


def refused(live: LiveState, folder: Path, *says: str) -> None:
    """A resume is an error, and changes nothing."""
    before = snapshot(live)
    refusal(load, live, folder, says=[str(folder), *says])
    assert_same(snapshot(live), before)


def test_awkward_tensors(tmp_path: Path) -> None:
    saved, fresh = started(kind=Awkward), started(kind=Awkward, steps=5, seed=4)
    states.save_state(saved, tmp_path / "one", 3)
    load(fresh, tmp_path / "one")
    assert_same(snapshot(fresh), snapshot(saved))
    fresh.module.alias.weight.data[0] = 9.0
    assert fresh.module.head.weight[0, 0] == 9.0  # still tied


NAMES = [*zip(MAKERS, MAKERS, strict=True), ("fused", "deepspeed"), ("deepspeed", "adamw")]


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("names", NAMES, ids=" -> ".join)
def test_an_optimizer_resumes(names: tuple[str, str], before: int, tmp_path: Path) -> None:
    """Exactly; another Adam closely. `before`: steps of the resumed one; its state is replaced."""
    live, fresh = started(names[0]), started(names[1], before)
    states.save_state(live, tmp_path / "one", 3)
    load(fresh, tmp_path / "one")
    if names[0] == names[1]:
        assert_same(snapshot(fresh), snapshot(live))
        assert next_losses(fresh) == next_losses(live)
    else:
        assert next_losses(fresh) == pytest.approx(next_losses(live), rel=1e-5)


def test_hyperparameters_of_this_run_are_not_replaced(tmp_path: Path) -> None:
    """Only those that the optimizer counts itself are restored."""
    states.save_state(started("counting"), tmp_path / "one", 3)
    fresh = started("counting", 0)
    (group,) = fresh.optimizer.param_groups
    group["weight_decay"] = 0.25
    load(fresh, tmp_path / "one")
    assert (group["weight_decay"], group["k"]) == (0.25, 3)


def frozen(name: str, size: int) -> Callable[[Any], object]:
    parameter = nn.Parameter(torch.ones(size), requires_grad=False)
    return lambda model: model.register_parameter(name, parameter)


# what the error says -> a change of the model
CHANGES: dict[str, Callable[[Any], object]] = {
    "extra": frozen("extra", 2),
    "frozen": lambda model: delattr(model, "frozen"),
    "frozen has shape [7]": frozen("frozen", 8),
    "mask has shape [3]": lambda model: model.register_buffer("mask", torch.ones(2).bool()),
    "head.weight": lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(13, 7))),
}


@pytest.mark.parametrize("message", CHANGES)
def test_another_model_is_refused(tmp_path: Path, message: str) -> None:
    states.save_state(started(kind=Awkward), tmp_path / "one", 3)
    fresh = started(kind=Awkward)
    CHANGES[message](fresh.module)
    fresh = live_state(accelerator_of(), fresh.module, fresh.optimizer)
    refused(fresh, tmp_path / "one", message)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    states.save_state(started("counting"), tmp_path / "one", 3)
    refused(started("adamw"), tmp_path / "one", "Counting", "AdamW")
    module = started("counting", 0).module
    one, *others = module.parameters()
    optimizer = Counting([{"params": [one]}, {"params": others}], lr=0.01)
    two_groups = live_state(accelerator_of(), module, optimizer)
    refused(two_groups, tmp_path / "one", "Counting", "parameter groups")


def test_state_that_cannot_be_saved_is_named() -> None:
    live = started("counting", 1)
    live.optimizer.state[live.module.embed.weight]["history"] = [1]  # as LBFGS has
    refusal(live.moment_shapes, says=["Counting", "history", "embed.weight"])
    live.optimizer.param_groups[0]["past"] = torch.zeros(2)
    refusal(live.changed_groups, says=["Counting", "past"])
    rows = started("adafactor", 1)
    rows.sharded = True  # no shard has rows and columns of the whole parameter
    refusal(rows.moment_shapes, says=["Adafactor", "row_var"])
