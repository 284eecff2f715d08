"""toolkit/training/optimizer_trial.py: which optimizers compute the same from shards of parameters. The verdicts on 50
classes of `pytorch_optimizer` 4.1 were compared by hand with runs in one process, ZeRO-2, ZeRO-3 and FSDP2."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers

from tests.training.test_optimizer import accelerator_with
from toolkit.training.checks import optimizer_fault
from toolkit.training.optimizer import HIDDEN, Lion, Muon
from toolkit.training.optimizer_trial import resume_fault, shard_fault, step_fault

CPU = torch.device("cpu")
STAGES = {"zero2": 2, "zero3": 3, "fsdp2": 0}
SHARDED, ZERO, ZERO3 = ("zero2", "zero3", "fsdp2"), ("zero2", "zero3"), ("zero3",)


class Model(torch.nn.Module):
    def __init__(self, wide: int = 200) -> None:
        super().__init__()
        self.embedding, self.one, self.two = (
            torch.nn.Linear(wide, wide + place) for place in range(3)
        )


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices, vectors = (
        [each for each in model.parameters() if (each.ndim > 1) is kind] for kind in (True, False)
    )
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def verdicts(optimizer: torch.optim.Optimizer) -> set[str]:
    """The strategies that do not support it."""
    return {name for name, stage in STAGES.items() if shard_fault(optimizer, CPU, stage)}


class Rule(torch.optim.Optimizer):
    """SGD with the updates of a rule: (parameter, gradient, state, group) -> update."""

    def __init__(self, params: Any, rule: Callable[..., torch.Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.rule, self.calls = rule, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["calls"], group["count"] = self.calls, group.get("count", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(
                    self.rule(parameter, parameter.grad, state, group), alpha=group["lr"]
                )


def projected(weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    """AdamP (Heo et al., 2021): only where a gradient is at right angles to a whole parameter that a norm follows."""
    along = (weight * gradient).sum() / weight.norm()
    return (
        gradient - along * weight / weight.norm()
        if along.abs() < 0.01 * gradient.norm()
        else gradient
    )


def factored(weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    """Adafactor as optax has it: rows and columns, of parameters with 128 of each."""
    if weight.ndim < 2 or min(weight.shape) < 128:
        return gradient.sign()
    return gradient / gradient.square().mean(1, keepdim=True).sqrt()


def growing(weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    """A step size estimated from all parameters, which is very small at first (Prodigy, Mishchenko, 2023)."""
    group["d"] = group.get("d", 1e-9) + 1e-12 * float(gradient.norm())
    return gradient * group["d"]


RULES: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "weight by weight": (lambda w, g, s, group: g.sign() * w.abs().clamp(max=1), ()),
    "a parameter's norm (NovoGrad, LAMB)": (lambda w, g, s, group: g / g.norm(), SHARDED),
    "a parameter's shape": (lambda w, g, s, group: g if w.ndim > 1 else g / 2, ZERO),
    "rows": (lambda w, g, s, group: g - g.mean(-1, keepdim=True) if w.ndim > 1 else g, ZERO),
    "columns": (lambda w, g, s, group: g - g.mean(0, keepdim=True), SHARDED),
    "right angles": (projected, SHARDED),
    "only of many rows": (factored, SHARDED),
    "only late": (lambda w, g, s, group: g / g.norm() if s["step"] == 11 else g, SHARDED),
    "only of large gradients": (
        lambda w, g, s, group: g / max(1.0, float(g.norm()) / 100),
        SHARDED,
    ),
    "a step size of its own": (growing, SHARDED),
    "the calls, counted in each group": (lambda w, g, s, group: g / group["count"], ZERO3),
    "the calls, counted by the optimizer": (lambda w, g, s, group: g / group["calls"], ZERO),
    "chance": (lambda w, g, s, group: g * torch.rand_like(g), SHARDED),
    "matrices alone": (lambda w, g, s, group: g @ g.T @ g if w.ndim > 1 else g, SHARDED),
}


class Clipping(Rule):
    """By the norm of all its gradients together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lambda w, g, s, group: g)

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_(
            [each for group in self.param_groups for each in group["params"]], 0.1
        )
        super().step()


class Early(Rule):
    """Creates the state of all parameters in its constructor, and never later."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lambda w, g, s, group: g + 0 * s["sum"])
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.ones_like(parameter)


# of torch.optim: those that work on shards, and those that need whole parameters
ELEMENTWISE = (
    "Adadelta",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
WHOLE = ("Adafactor", "Adagrad", "Muon")
OTHERS = ("LBFGS", "SparseAdam")  # fail in any loop


def test_all_optimizers_of_pytorch_are_tested() -> None:
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and name != "Optimizer"
    }
    assert kinds == {*ELEMENTWISE, *WHOLE, *OTHERS}


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        *((partial(Rule, rule=rule), refused) for rule, refused in RULES.values()),
        *((partial(getattr(torch.optim, name), lr=5e-5), ()) for name in ELEMENTWISE),
        (Clipping, SHARDED),
        (Early, SHARDED),
        (lambda groups: torch.optim.AdamW(groups, lr=5e-5, fused=True), ()),
        (lambda groups: torch.optim.AdamW(groups, lr=5e-5, foreach=False, amsgrad=True), ()),
        (lambda groups: torch.optim.SGD(groups, lr=5e-5, momentum=0.9, nesterov=True), ()),
        (Lion, ()),
        (torch.optim.Adafactor, SHARDED),
        (lambda groups: transformers.Adafactor(groups, lr=1e-4, relative_step=False), SHARDED),
        (lambda groups: Muon([groups[0] | {HIDDEN: True}, groups[1]]), SHARDED),
        (lambda groups: torch.optim.Muon(groups[:1]), SHARDED),
    ],
)
def test_optimizers_on_shards(make: Any, refused: tuple[str, ...]) -> None:
    optimizer = make(groups_of(Model()))
    assert (step_fault(optimizer, CPU), verdicts(optimizer)) == ("", set(refused))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_pytorchs_optimizers_on_dtensors(name: str, one_process: None) -> None:
    """Rprop assigns to elements by a mask, which DTensors do not support."""
    optimizer = getattr(torch.optim, name)(groups_of(Model()), lr=5e-5)
    assert bool(shard_fault(optimizer, CPU, 0)) is (name == "Rprop")


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_that_fail_in_the_loop(name: str) -> None:
    optimizer = getattr(torch.optim, name)(Model().parameters())
    fault = optimizer_fault(accelerator_with(), optimizer)
    assert name in fault
    assert "--optimizer adamw" in fault


@pytest.mark.parametrize(
    ("rule", "saved"),
    [
        (lambda weight, gradient, state, group: gradient / state["step"], True),
        (
            lambda weight, gradient, state, group: (
                gradient / group["count"] + torch.randn_like(gradient)
            ),
            True,
        ),
        (
            lambda weight, gradient, state, group: gradient / group["calls"],
            False,
        ),  # of an attribute
        (lambda weight, gradient, state, group: gradient * (1 + (group["calls"] % 5 == 0)), False),
    ],
)
def test_state_that_no_checkpoint_saves(rule: Any, saved: bool) -> None:
    assert bool(resume_fault(Rule(groups_of(Model()), rule), CPU)) is not saved


def test_a_trial_changes_nothing() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=5e-5, fused=True)
    before, random = [each.clone() for each in model.parameters()], torch.get_rng_state()
    assert (step_fault(optimizer, CPU), verdicts(optimizer)) == ("", set())
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert [each.grad for each in model.parameters()] == [None] * 6
    assert optimizer.param_groups[0]["params"][0] is model.embedding.weight
    assert [group["lr"] for group in optimizer.param_groups] == [5e-5, 5e-5]


def test_wrapped_optimizers() -> None:
    class Wrapper(torch.optim.Optimizer):
        """Shares the groups of the wrapped optimizer, as a Lookahead does."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.defaults = inner, inner.defaults
            self.param_groups, self.state = inner.param_groups, inner.state

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    class Initialized(Wrapper):
        """Loading a state replaces its groups, but not those of the wrapped optimizer."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            torch.optim.Optimizer.__init__(self, inner.param_groups, inner.defaults)
            self.inner, inner.param_groups = inner, self.param_groups

    adamw = torch.optim.AdamW(groups_of(Model()))
    assert "_hooks" in step_fault(Wrapper(adamw), CPU)  # an attribute that torch's constructor sets
    assert "param_groups" in step_fault(Initialized(adamw), CPU)
    # ZeRO-1 and 2 set one group at a time in the wrapper, and AdamW steps all of its groups each time
    assert verdicts(Wrapper(torch.optim.AdamW(groups_of(Model())))) == {"zero2"}
    assert verdicts(Wrapper(torch.optim.Adafactor(groups_of(Model())))) == set(SHARDED)


def test_optimizers_that_cannot_be_copied_are_refused_for_shards_only() -> None:
    class Holds(torch.optim.SGD):
        ended = 0

        def __del__(self) -> None:
            Holds.ended += 1

    optimizer = Holds(groups_of(Model()), lr=0.1)
    assert (step_fault(optimizer, CPU), verdicts(optimizer)) == ("", set(SHARDED))
    Holds.__module__ = "deepspeed.ops.adam.cpu_adam"  # made for it
    assert optimizer_fault(accelerator_with({}), optimizer) == ""
    assert Holds.ended == 0


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (torch.optim.AdamW, set()),
        (torch.optim.Adafactor, {2, 3, "fsdp2"}),
        (torch.optim.Adagrad, {2, 3}),  # which DeepSpeed replaces
        (lambda groups: Rule(groups, RULES["rows"][0]), {2, 3}),
    ],
)
def test_the_error_names_a_strategy_and_an_optimizer_that_work(
    make: Any, refused: set[Any]
) -> None:
    for strategy in (0, 2, 3, "fsdp2"):
        config = {} if strategy in (2, 3) else None
        accelerator = accelerator_with(config, stage=strategy, is_fsdp2=strategy == "fsdp2")
        fault = optimizer_fault(accelerator, make(groups_of(Model())))
        assert bool(fault) is (strategy in refused)
        if fault:
            assert {"ddp", "adamw"} <= set(re.findall(r"\w+", fault))
