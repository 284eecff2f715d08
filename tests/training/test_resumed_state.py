"""toolkit/training/{optimizer,half_precision}.py: a resumed run's schedule and loss scale."""

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from torch.optim import lr_scheduler

from tests.faults import refusal
from toolkit.config import SchedulerName, TrainingSettings
from toolkit.training.extra_state import (
    load_registered,
    random_states,
    registered_content,
    set_random_states,
)
from toolkit.training.optimizer import make_scheduler, set_schedule
from toolkit.training.precision import scaler_state, set_scaler

TOTAL = 17


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda plain: lr_scheduler.OneCycleLR(plain, max_lr=1e-3, total_steps=TOTAL + 4),
    "CosineAnnealingLR": lambda plain: lr_scheduler.CosineAnnealingLR(plain, T_max=TOTAL),
    "SequentialLR": lambda plain: lr_scheduler.SequentialLR(
        plain,
        [lr_scheduler.LinearLR(plain, 0.1, total_iters=4), lr_scheduler.ExponentialLR(plain, 0.9)],
        milestones=[4],
    ),
}


@pytest.fixture(autouse=True)
def no_accumulation() -> None:
    """accelerate's schedulers do not step within one, which a test before these may have left open."""
    GradientState()._set_sync_gradients(True)


def make(name: str) -> tuple[Any, Any]:
    """An optimizer and its schedule."""
    warmup = {} if name == "constant" else {"warmup_steps": 4}
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.AdamW(
        [{"params": [one], "weight_decay": 0.1}, {"params": [two]}], lr=1e-3
    )
    kind: Any = "linear" if name in SCHEDULES else name
    settings = TrainingSettings(learning_rate=1e-3, lr_scheduler_type=kind, **warmup)  # type: ignore[arg-type]
    optimizer.step_was_skipped = False  # type: ignore[attr-defined]  # as of a prepared one
    own = SCHEDULES[name](optimizer) if name in SCHEDULES else None
    return optimizer, make_scheduler(optimizer, settings, TOTAL, own)


def take(optimizer: Any, scheduler: Any) -> list[Any]:
    """Returns the learning rates and the count of a step, and takes it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    values = [scheduler.get_last_lr(), rates, scheduler.scheduler.last_epoch]
    optimizer.step()
    scheduler.step()
    return values


@pytest.mark.parametrize("name", [*get_args(SchedulerName), *SCHEDULES])
def test_setting_a_schedule_is_stepping_it(name: str) -> None:
    for steps in (0, 1, 4, 9, TOTAL):
        stepped, fresh = make(name), make(name)
        for _ in range(steps):
            take(*stepped)
        set_schedule(fresh[1], steps)
        for _ in range(4):
            assert take(*fresh) == take(*stepped)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_custom_schedule_has_the_rates_of_torchs(name: str) -> None:
    alone = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule, pair = SCHEDULES[name](alone), make(name)
    set_schedule(pair[1], 0)
    for _ in range(TOTAL + 4):
        assert take(*pair)[0][0] == pytest.approx(schedule.get_last_lr()[0])
        alone.step()
        schedule.step()


def there_and_back(source: tuple[Any, Any], target: tuple[Any, Any]) -> None:
    set_scaler(*target, json.loads(json.dumps(scaler_state(*source))))


def torch_scaler(scale: float = 65536.0) -> tuple[Any, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return SimpleNamespace(scaler=scaler), SimpleNamespace()


def deepspeed_scaler() -> tuple[Any, Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        2**16, scale_window=3, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )
    return SimpleNamespace(scaler=None), SimpleNamespace(
        optimizer=SimpleNamespace(loss_scaler=scaler)
    )


def overflow_pattern(pair: tuple[Any, Any]) -> list[float]:
    """The scales that follow, with an overflow at the second and sixth step."""
    scaler, scales = pair[1].optimizer.loss_scaler, []
    for step in range(8):
        scaler.update_scale(step in (1, 5))
        scales.append(scaler.cur_scale)
    return scales


def test_deepspeeds_scaler_resumes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    # rank 0 logs
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    source, target = deepspeed_scaler(), deepspeed_scaler()
    overflow_pattern(source)
    there_and_back(source, target)
    assert scaler_state(*target) == scaler_state(*source)
    assert overflow_pattern(target) == overflow_pattern(source)
    assert overflow_pattern(target) != overflow_pattern(deepspeed_scaler())


def test_torchs_scaler_resumes_exactly_and_its_scale_crosses_strategies() -> None:
    source, target = torch_scaler(1024.0), torch_scaler()
    source[0].scaler._growth_tracker.fill_(2)
    there_and_back(source, target)
    assert target[0].scaler.state_dict() == source[0].scaler.state_dict()
    assert target[0].scaler.get_scale() == 1024.0
    ours, theirs = torch_scaler(512.0), deepspeed_scaler()
    there_and_back(ours, theirs)
    assert theirs[1].optimizer.loss_scaler.cur_scale == 512.0
    theirs[1].optimizer.loss_scaler.cur_scale = 128.0
    there_and_back(theirs, ours)
    assert ours[0].scaler.get_scale() == 128.0
    assert ours[0].scaler.get_growth_interval() == 3  # unchanged


class Registered:
    """Loads only states of a number or a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"] + 0


def test_registered_objects() -> None:
    def accelerator(*values: Any) -> Any:
        return SimpleNamespace(_custom_objects=[Registered(value) for value in values])

    load_registered(accelerator(), registered_content(accelerator()))
    content = registered_content(accelerator(3, torch.ones(2)))
    fresh = accelerator(0, 0)
    load_registered(fresh, content)
    assert [str(each.value) for each in fresh._custom_objects] == ["3", "tensor([1., 1.])"]
    says = ["has 2 states", "register_for_checkpointing", "1 objects"]
    refusal(load_registered, accelerator(0), content, says=says)
    message = r"register_for_checkpointing\(Registered\)"
    refusal(registered_content, accelerator(SimpleNamespace()), match=message)


def test_random_states_there_and_back() -> None:
    random.gauss(0, 1), np.random.randn()  # each stores the second of a pair
    states = json.loads(json.dumps(random_states(torch.device("cpu"))))

    def draws() -> list[float]:
        return [
            random.gauss(0, 1),
            random.random(),
            np.random.randn(),
            np.random.rand(),
            torch.rand(1).item(),
        ]

    first = draws()
    draws()
    set_random_states(states)
    assert draws() == first
