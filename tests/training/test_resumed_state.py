"""toolkit/training/{optimizer,precision,extra_state}.py: the schedule, the loss scale, the random generators and the
recipe's own objects of a resumed run. (Promise 3.)"""

import json
import random
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
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


def make(name: str) -> tuple[Any, Any]:
    """An optimizer, and the schedule of this name or a recipe's own."""
    optimizer: Any = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    optimizer.step_was_skipped = False  # as of a prepared one
    if name == "own":
        own = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=TOTAL + 1)
        return optimizer, make_scheduler(optimizer, TrainingSettings(), TOTAL, own)
    warmup: dict[str, Any] = {} if name == "constant" else {"warmup_steps": 4}
    settings = TrainingSettings(learning_rate=1e-3, lr_scheduler_type=name, **warmup)
    return optimizer, make_scheduler(optimizer, settings, TOTAL)


@pytest.mark.parametrize("name", [*get_args(SchedulerName), "own"])
def test_setting_a_schedule_is_stepping_it(name: str) -> None:
    # accelerate's schedulers do not step within an accumulation, which another test may have left open
    GradientState()._set_sync_gradients(True)
    optimizer, stepped = make(name)
    for steps in range(TOTAL):
        _, fresh = make(name)
        set_schedule(fresh, steps)
        assert fresh.get_last_lr() == stepped.get_last_lr()
        assert fresh.scheduler.last_epoch == stepped.scheduler.last_epoch == steps
        optimizer.step()
        stepped.step()


def there_and_back(source: tuple[Any, Any], target: tuple[Any, Any]) -> None:
    set_scaler(*target, json.loads(json.dumps(scaler_state(*source))))


def torchs(scale: float = 65536.0) -> tuple[Any, Any]:
    """(an accelerator, its optimizer) with torch's scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return SimpleNamespace(scaler=scaler), SimpleNamespace()


def deepspeeds() -> tuple[Any, Any]:
    scaler = DynamicLossScaler(2**16, 3, 1, 2, consecutive_hysteresis=False)
    zero = SimpleNamespace(loss_scaler=scaler)
    return SimpleNamespace(scaler=None), SimpleNamespace(optimizer=zero)


def overflow_pattern(pair: tuple[Any, Any]) -> list[float]:
    """The scales that follow, with an overflow at the second and sixth step."""
    scaler, scales = pair[1].optimizer.loss_scaler, []
    for step in range(8):
        scaler.update_scale(step in (1, 5))
        scales.append(scaler.cur_scale)
    return scales


def test_a_scaler_resumes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    # rank 0 logs
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    source, target = deepspeeds(), deepspeeds()
    overflow_pattern(source)
    there_and_back(source, target)
    assert overflow_pattern(target) == overflow_pattern(source) != overflow_pattern(deepspeeds())
    source, target = torchs(1024.0), torchs()
    source[0].scaler._growth_tracker.fill_(2)
    there_and_back(source, target)
    assert target[0].scaler.state_dict() == source[0].scaler.state_dict()


def test_a_scale_crosses_strategies() -> None:
    ours, theirs = torchs(512.0), deepspeeds()
    there_and_back(ours, theirs)
    scaler = theirs[1].optimizer.loss_scaler
    assert scaler.cur_scale == 512.0
    scaler.cur_scale = 128.0
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

    content = registered_content(accelerator(3, torch.ones(2)))
    fresh = accelerator(0, 0)
    load_registered(fresh, content)
    assert [str(each.value) for each in fresh._custom_objects] == ["3", "tensor([1., 1.])"]
    says = ["has 2 states", "register_for_checkpointing", "1 objects"]
    refusal(load_registered, accelerator(0), content, says=says)
    message = r"register_for_checkpointing\(Registered\)"
    refusal(registered_content, accelerator(SimpleNamespace()), match=message)


def draws() -> list[float]:
    """Of Python and NumPy also the second of a pair that each stores."""
    gauss = [random.gauss(0, 1), np.random.randn()]
    return [*gauss, random.random(), np.random.rand(), torch.rand(1).item()]


def test_random_states_there_and_back() -> None:
    draws()
    states = json.loads(json.dumps(random_states(torch.device("cpu"))))
    first = draws()
    draws()
    set_random_states(states)
    assert draws() == first
