"""toolkit/training: how many optimizer steps, of how many micro-batches, at which learning rate."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from toolkit.config import SchedulerName, TrainingSettings
from toolkit.data.batches import shares
from toolkit.training.loop import make_schedule
from toolkit.training.optimizer import make_scheduler


@pytest.mark.parametrize(
    ("given", "samples", "steps_per_epoch", "total"),
    [
        ({}, 100, 4, 12),
        ({"num_train_epochs": 0.5}, 100, 4, 2),
        ({"num_train_epochs": 0.3}, 100, 4, 2),
        ({"num_train_epochs": 2.5}, 96, 3, 8),
        ({"max_steps": 7}, 100, 4, 7),
        ({"max_steps": 7, "num_train_epochs": 1}, 100, 4, 7),
        ({"global_batch_size": 1}, 5, 5, 15),
        ({"global_batch_size": 1000}, 5, 1, 3),
    ],
)
def test_steps(given: dict[str, Any], samples: int, steps_per_epoch: int, total: int) -> None:
    schedule = make_schedule(TrainingSettings(**given), np.full(samples, 8), processes=1)
    assert (schedule.steps_per_epoch, schedule.total_steps) == (steps_per_epoch, total)


@pytest.mark.parametrize("processes", range(1, 9))
def test_steps_do_not_depend_on_the_processes(processes: int) -> None:
    schedule = make_schedule(TrainingSettings(per_device_batch_size=4), np.full(101, 8), processes)
    assert (schedule.steps_per_epoch, schedule.total_steps, schedule.eval_every) == (4, 12, 4)


@pytest.mark.parametrize(
    ("per_device", "processes", "accumulation", "micro"),
    [
        (32, 1, 1, 32),
        (8, 1, 4, 8),
        (8, 2, 2, 8),
        (8, 4, 1, 8),
        (8, 3, 2, 6),
        (5, 1, 7, 5),
        (100, 2, 1, 16),
        (1, 64, 1, 1),
    ],
)
def test_accumulation_follows_from_the_upper_bound(
    per_device: int, processes: int, accumulation: int, micro: int
) -> None:
    settings = TrainingSettings(global_batch_size=32, per_device_batch_size=per_device)
    schedule = make_schedule(settings, np.full(1000, 8), processes)
    assert (schedule.accumulation, schedule.micro_batch_size) == (accumulation, micro)


@pytest.mark.parametrize("processes", range(1, 6))
@pytest.mark.parametrize("global_batch_size", [1, 5, 16, 33])
def test_the_schedule_says_what_the_shares_are(processes: int, global_batch_size: int) -> None:
    settings = TrainingSettings(global_batch_size=global_batch_size, per_device_batch_size=4)
    schedule = make_schedule(settings, np.full(1000, 8), processes)
    lengths = np.ones(global_batch_size, np.int64)
    mine = [shares(np.arange(global_batch_size), lengths, 4, rank, processes) for rank in range(processes)]
    assert {len(rank) for rank in mine} == {schedule.accumulation}
    assert max(len(share) for rank in mine for share in rank) == schedule.micro_batch_size


@pytest.mark.parametrize(
    ("given", "steps"),
    [({}, [4, 8, 12]), ({"eval_every": 5}, [5, 10, 12]), ({"eval_every": 100}, [12]), ({"max_steps": 6}, [4, 6])],
)
def test_evaluations(given: dict[str, Any], steps: list[int]) -> None:
    schedule = make_schedule(TrainingSettings(**given), np.full(100, 8), 1)
    assert [step for step in range(1, schedule.total_steps + 1) if schedule.evaluates_after(step)] == steps


def rates(total: int, **given: Any) -> list[float]:
    """The learning rate of each optimizer step."""
    settings = TrainingSettings(learning_rate=1.0, **given)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(optimizer, settings, total)
    found = []
    for _ in range(total):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("given", "warmup"),
    [
        ({}, 0),
        ({"warmup_steps": 3}, 3),
        ({"warmup_ratio": 0.2}, 2),
        ({"warmup_ratio": 0.11}, 2),
        ({"warmup_steps": 0}, 0),
        ({"warmup_ratio": 0.0}, 0),
    ],
)
def test_warmup_is_counted_in_optimizer_steps(given: dict[str, Any], warmup: int) -> None:
    expected = [step / warmup if step < warmup else (10 - step) / (10 - warmup) for step in range(10)]
    assert rates(10, **given) == pytest.approx(expected)


def test_a_ratio_of_one_warms_up_to_the_end() -> None:
    assert rates(4, warmup_ratio=1.0) == pytest.approx([0, 0.25, 0.5, 0.75])


def test_known_schedules() -> None:
    assert rates(4, lr_scheduler_type="constant") == [1, 1, 1, 1]
    cosine = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates(8, lr_scheduler_type="cosine") == pytest.approx(cosine)
    assert rates(4, lr_scheduler_type="constant_with_warmup", warmup_steps=2) == [0, 0.5, 1, 1]


@pytest.mark.parametrize("name", get_args(SchedulerName))
def test_every_schedule_that_can_be_named_runs(name: str) -> None:
    warmup = {} if name == "constant" else {"warmup_steps": 2}
    found = rates(10, lr_scheduler_type=name, **warmup)
    assert all(0 <= rate <= 1 for rate in found)
    assert max(found) == pytest.approx(1.0)
    assert found[0] == (1.0 if name == "constant" else 0.0)


@pytest.mark.parametrize("name", ["constant"])
def test_a_warmup_is_not_ignored(name: str) -> None:
    """`constant` has none: asking for both is a contradiction, or the warm-up happens."""
    from toolkit.config import TaskSettings, build
    from toolkit.errors import UserError

    try:
        build(TaskSettings, {"lr_scheduler_type": name, "warmup_steps": 2})
    except UserError as error:
        assert "warmup_steps" in str(error)  # noqa: PT017
    else:
        assert rates(10, lr_scheduler_type=name, warmup_steps=2)[0] == 0.0
