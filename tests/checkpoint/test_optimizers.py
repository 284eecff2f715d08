"""Every kind of optimizer resumes exactly; state that cannot be restored is refused by name before anything is changed.
Across strategies: tests/checkpoint/test_elastic_state.py."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.checkpoint.elastic_ways import OPTIMIZERS, Lion
from tests.checkpoint.handmade import assert_same
from tests.checkpoint.test_restore import ACCELERATOR, Flattened, refused, save, snapshot
from tests.faults import refusal
from toolkit.checkpoint.live import LiveState, live_state
from toolkit.checkpoint.restore import restore
from toolkit.checkpoint.save import optimizer_facts


class Strange(torch.optim.Optimizer):
    """With matrices, numbers, a hyperparameter that it changes, and state that belongs to no parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0, "betas": (0.5, 0.5), "past": torch.zeros(2)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        seen = self.state.setdefault("seen", {"steps": torch.tensor([0])})  # type: ignore[arg-type]
        seen["steps"] += 1
        for group in self.param_groups:
            group["d"] *= 1.5
            group["past"] += group["d"]
            group["betas"] = (group["betas"][0] * 0.9, 0.5)
            for parameter in group["params"]:
                state = self.state[parameter]
                rows = parameter.grad.view(len(parameter.grad), -1)
                state["matrix"] = state.get("matrix", 0) + rows @ rows.T
                state["count"], state["sign"], state["none"] = state.get("count", 0) + 1, True, None
                scale = group["d"] * seen["steps"] * state["count"] / (1 + state["matrix"].trace())
                parameter.sub_(parameter.grad, alpha=group["lr"] * float(scale / group["past"][0]) * group["betas"][0])


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
    "strange": functools.partial(Strange, lr=0.01),
    "deepspeed": functools.partial(DeepSpeedCPUAdam, lr=0.01),
}


def started(name: str, steps: int) -> LiveState:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(13, 7), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 13))
    state = live_state(ACCELERATOR, model, MAKERS[name](model.parameters()))
    for step in range(steps):
        take_step(state, step)
    return state


def take_step(state: LiveState, step: int) -> float:
    tokens = torch.randint(13, (6,), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(state.module(tokens), tokens.roll(1))
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    ("name", "saved_at", "before"), [*((name, 3, before) for name in MAKERS for before in (0, 5)), ("momentum", 0, 3)]
)
def test_resumed_exactly(tmp_path: Path, name: str, saved_at: int, before: int) -> None:
    """`before`: steps of the resumed optimizer, whose state must be replaced."""
    state = started(name, saved_at)
    reader, saved = save(state, tmp_path / "one"), snapshot(state)
    uninterrupted = [take_step(state, step) for step in range(3, 6)]
    fresh = started(name, before)
    restore(fresh, reader, saved_at)
    assert_same(snapshot(fresh), saved)
    assert bool(fresh.optimizer.state) == (saved_at > 0 and name != "sgd")
    assert [take_step(fresh, step) for step in range(3, 6)] == uninterrupted


@pytest.mark.parametrize("names", [("adamw", "deepspeed"), ("deepspeed", "adamw")], ids=" -> ".join)
def test_between_torchs_adam_and_deepspeeds(names: tuple[str, str], tmp_path: Path) -> None:
    state, fresh = started(names[0], 3), started(names[1], 0)
    restore(fresh, save(state, tmp_path / "one"), 3)
    losses = [[take_step(one, step) for step in range(3, 6)] for one in (state, fresh)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_hyperparameters_of_this_run_are_not_replaced(tmp_path: Path) -> None:
    """Only those that the optimizer changes are restored."""
    state, fresh = started("lion", 3), started("lion", 0)
    fresh.optimizer.param_groups[0]["weight_decay"] = 0.25
    restore(fresh, save(state, tmp_path / "one"), 3)
    assert fresh.optimizer.param_groups[0]["weight_decay"] == 0.25
    assert fresh.optimizer.param_groups[0]["k"] == 3


def test_another_class_and_other_groups_are_refused(tmp_path: Path) -> None:
    reader = save(started("momentum", 3), tmp_path / "sgd")
    assert "was saved by SGD, and this run has AdamW" in refused(started("adamw", 1), reader)
    fresh = started("lion", 0)
    one, *others = fresh.module.parameters()
    optimizer = Lion([{"params": [one]}, {"params": others}], lr=0.01)
    message = refused(live_state(ACCELERATOR, fresh.module, optimizer), save(started("lion", 3), tmp_path / "one"))
    assert "Lion had 1 parameter groups, in which it changed k, and has 2" in message


@pytest.mark.parametrize(
    ("name", "key"), [("adafactor", "col_var, row_var"), ("transformers", "exp_avg_sq_col, exp_avg_sq_row")]
)
def test_factors_do_not_cross_into_zero(tmp_path: Path, name: str, key: str) -> None:
    """Such an optimizer gets vectors there, and has other state."""
    reader = save(started(name, 3), tmp_path / "one")
    message = refused(Flattened(started(name, 2)), reader)
    assert f"has {key} of the unsharded 0.weight, which zero2 on 1 cannot restore: resume under single" in message


def test_values_that_differ_by_rank_are_refused_in_another_world(tmp_path: Path) -> None:
    reader = save(started("lion", 3), tmp_path / "one")
    tables = [{"groups": [{"k": count}], "state": {}} for count in (3, 4)]
    apart = dataclasses.replace(reader, strategy="zero2", world=2, optimizer={"class": "Lion", "ranks": tables})
    assert "has another k on each rank" in refused(started("lion", 0), apart)


class Listing(Lion):
    """With a list in its state, as LBFGS."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0]]["history"] = [1]


def test_unsavable_state_is_refused_at_the_save() -> None:
    model = nn.Linear(2, 2)
    for optimizer, message in (
        (Listing(model.parameters(), lr=0.1), r"Listing has history \(list\) of weight"),
        (Lion([*model.parameters(), nn.Parameter(torch.ones(5))], lr=0.1), r"shape \[5\] that is no parameter"),
    ):
        state = live_state(ACCELERATOR, model, optimizer)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        refusal(optimizer_facts, state, match=message)


def test_the_keys_of_adams_file(tmp_path: Path) -> None:
    """Those of the first format; checksums are the only metadata."""
    reader = save(started("adamw", 3), tmp_path / "one")
    assert {tuple(state) for state in reader.optimizer_state.values()} == {("exp_avg", "exp_avg_sq")}
    content = (tmp_path / "one" / "optimizer.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header.pop("__metadata__")) == ["crc32"]
    assert {key.partition(".")[0] for key in header} == {"exp_avg", "exp_avg_sq", "step"}
