"""Every kind of model and optimizer resumes exactly in one process; what does not fit is refused by
name, before anything is changed. Across strategies: tests/checkpoint/test_elastic_state.py."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.checkpoint.elastic_ways import OPTIMIZERS, Lion, accelerator_of
from tests.checkpoint.saved import save_state
from tests.faults import refusal
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.state import LiveState
from toolkit.checkpoint.strategies import live_state

assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Awkward(nn.Module):
    """Tied, frozen, scalar, empty, 16-bit and shared tensors, and buffers of many dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.alias = self.embed  # a module under two names
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.brief = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("mean", torch.randn(4).bfloat16())
        self.register_buffer("wide", torch.randn(2, dtype=torch.float64))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)
        self.one, self.two = nn.Module(), nn.Module()
        shared = torch.arange(6)
        self.one.register_buffer("table", shared)
        self.two.register_buffer("table", shared)

    def forward(self) -> torch.Tensor:
        hidden = self.head(self.embed(torch.arange(5))) * self.scalar
        return (hidden**2).mean() + (self.brief.float() ** 3).sum() + self.nothing.sum()


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
    **{name: functools.partial(make, lr=0.01) for name, (make, _) in OPTIMIZERS.items()},
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.01),
    "transformers": functools.partial(transformers.Adafactor, lr=0.01, relative_step=False),
    "deepspeed": functools.partial(DeepSpeedCPUAdam, lr=0.01),
}


def started(name: str, steps: int, model: nn.Module | None = None) -> LiveState:
    torch.manual_seed(3)
    if model is None:
        model = nn.Sequential(nn.Embedding(13, 7), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 13))
    live = live_state(accelerator_of(None), model, MAKERS[name](model.parameters()))
    for step in range(steps):
        take_step(live, step)
    return live


def take_step(live: LiveState, step: int) -> float:
    tokens = torch.randint(13, (6,), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(live.module(tokens), tokens.roll(1))
    live.optimizer.zero_grad()
    loss.backward()
    live.optimizer.step()
    return loss.item()


def awkward(seed: int, steps: int = 3) -> LiveState:
    torch.manual_seed(seed)
    model = Awkward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return live_state(accelerator_of(None), model, optimizer)


def snapshot(live: LiveState) -> dict[str, torch.Tensor]:
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
    saved, fresh = awkward(1), awkward(2, steps=5)
    save_state(saved, tmp_path / "one", 3)
    load(fresh, tmp_path / "one")
    assert_same(snapshot(fresh), snapshot(saved))
    fresh.module.alias.weight.data[0] = 9.0
    assert fresh.module.head.weight[0, 0] == 9.0  # still tied


@pytest.mark.parametrize(
    ("name", "saved_at", "before"),
    [*((name, 3, before) for name in MAKERS for before in (0, 5)), ("momentum", 0, 3)],
)
def test_an_optimizer_resumes_exactly(
    tmp_path: Path, name: str, saved_at: int, before: int
) -> None:
    """`before`: steps of the resumed optimizer, whose state must be replaced."""
    live = started(name, saved_at)
    save_state(live, tmp_path / "one", saved_at)
    saved = snapshot(live)
    uninterrupted = [take_step(live, step) for step in range(3, 6)]
    fresh = started(name, before)
    load(fresh, tmp_path / "one")
    assert_same(snapshot(fresh), saved)
    assert [take_step(fresh, step) for step in range(3, 6)] == uninterrupted


@pytest.mark.parametrize("names", [("adamw", "deepspeed"), ("deepspeed", "adamw")], ids=" -> ".join)
def test_between_torchs_adam_and_deepspeeds(names: tuple[str, str], tmp_path: Path) -> None:
    live, fresh = started(names[0], 3), started(names[1], 0)
    save_state(live, tmp_path / "one", 3)
    load(fresh, tmp_path / "one")
    losses = [[take_step(each, step) for step in range(3, 6)] for each in (live, fresh)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_hyperparameters_of_this_run_are_not_replaced(tmp_path: Path) -> None:
    """Only those that the optimizer counts itself are restored."""
    save_state(started("lion", 3), tmp_path / "one", 3)
    fresh = started("lion", 0)
    fresh.optimizer.param_groups[0]["weight_decay"] = 0.25
    load(fresh, tmp_path / "one")
    assert fresh.optimizer.param_groups[0]["weight_decay"] == 0.25
    assert fresh.optimizer.param_groups[0]["k"] == 3


def frozen(name: str, size: int) -> Callable[[Any], object]:
    parameter = nn.Parameter(torch.ones(size), requires_grad=False)
    return lambda model: model.register_parameter(name, parameter)


CHANGES: dict[str, Callable[[Any], object]] = {
    "extra": frozen("extra", 2),
    "frozen": lambda model: delattr(model, "frozen"),
    "frozen has shape [7]": frozen("frozen", 8),
    "mask has shape [3]": lambda model: model.register_buffer("mask", torch.ones(2).bool()),
    "head.weight": lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(5, 3))),
}


@pytest.mark.parametrize("message", CHANGES)
def test_another_model_is_refused(tmp_path: Path, message: str) -> None:
    save_state(awkward(1), tmp_path / "one", 3)
    fresh = awkward(2)
    CHANGES[message](fresh.module)
    fresh = live_state(accelerator_of(None), fresh.module, fresh.optimizer)
    refused(fresh, tmp_path / "one", message)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    save_state(started("momentum", 3), tmp_path / "sgd", 3)
    refused(started("adamw", 1), tmp_path / "sgd", "SGD", "AdamW")
    save_state(started("lion", 3), tmp_path / "lion", 3)
    module = started("lion", 0).module
    one, *others = module.parameters()
    optimizer = Lion([{"params": [one]}, {"params": others}], lr=0.01)
    two_groups = live_state(accelerator_of(None), module, optimizer)
    refused(two_groups, tmp_path / "lion", "Lion", "parameter groups")


class Listing(Lion):
    """With a list in its state, as LBFGS."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0]]["history"] = [1]


def test_state_that_cannot_be_saved_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = Listing(model.parameters(), lr=0.1)
    live = live_state(accelerator_of(None), model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    refusal(live.optimizer_shapes, says=["Listing", "history", "weight"])
    optimizer.param_groups[0]["past"] = torch.zeros(2)
    refusal(live.changed_groups, says=["Listing", "past"])
    rows = started("adafactor", 1)
    rows.sharded = True  # no shard has rows and columns of the whole parameter
    refusal(rows.optimizer_shapes, says=["Adafactor", "row_var"])
