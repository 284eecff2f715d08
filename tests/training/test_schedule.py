"""toolkit/training/schedule.py: numbers of steps and micro-batches, evaluations, learning rates."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.faults import refusal
from tests.splits import of_lengths
from toolkit.config import TrainingSettings
from toolkit.training.optimizer import make_scheduler
from toolkit.training.schedule import Schedule, make_schedule
from toolkit.training.steps import Step


def schedule_of(samples: int, processes: int, **options: Any) -> Schedule:
    return make_schedule(TrainingSettings(**options), of_lengths(np.full(samples, 8)), processes)


@pytest.mark.parametrize(
    ("options", "samples", "steps_per_epoch", "total"),
    [
        ({}, 100, 4, 12),
        ({"num_train_epochs": 0.3}, 100, 4, 2),
        ({"num_train_epochs": 2.5}, 96, 3, 8),
        ({"max_steps": 7, "num_train_epochs": 1}, 100, 4, 7),
        ({"global_batch_size": 1}, 5, 5, 15),
        ({"global_batch_size": 1000}, 5, 1, 3),
    ],
)
def test_steps(options: dict[str, Any], samples: int, steps_per_epoch: int, total: int) -> None:
    for processes in range(1, 9):
        schedule = schedule_of(samples, processes, **options)
        assert (schedule.steps_per_epoch, schedule.total_steps) == (steps_per_epoch, total)


@pytest.mark.parametrize(
    ("per_device", "processes", "accumulation", "micro"),
    [(32, 1, 1, 32), (8, 1, 4, 8), (8, 2, 2, 8), (8, 3, 2, 6), (5, 1, 7, 5), (100, 2, 1, 16), (1, 64, 1, 1)],
)  # fmt: skip
def test_accumulation(per_device: int, processes: int, accumulation: int, micro: int) -> None:
    schedule = schedule_of(1000, processes, global_batch_size=32, per_device_batch_size=per_device)
    assert (schedule.accumulation, schedule.micro_batch_size) == (accumulation, micro)


def test_a_text_longer_than_any_batch() -> None:
    split = of_lengths(np.array([8, 100, 30]))
    says = ["--max_tokens_per_batch 99", "100 tokens", "--max_length 99"]
    refusal(make_schedule, TrainingSettings(max_tokens_per_batch=99), split, 1, says=says)
    make_schedule(TrainingSettings(max_tokens_per_batch=100), split, 1)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [4, 8, 12]),
        ({"eval_every": 5}, [5, 10, 12]),
        ({"eval_every": 100}, [12]),
        ({"max_steps": 6}, [4, 6]),
    ],
)
def test_evaluations(options: dict[str, Any], steps: list[int]) -> None:
    schedule = schedule_of(100, 3, **options)
    run: Any = SimpleNamespace(schedule=schedule, collate=None)
    numbers = range(1, schedule.total_steps + 1)
    due = [number for number in numbers if Step(run, number, np.zeros(0), None, 1).evaluates]
    assert due == steps


@pytest.mark.parametrize(
    ("options", "warmup"),
    [({}, 0), ({"warmup_steps": 3}, 3), ({"warmup_ratio": 0.2}, 2), ({"warmup_ratio": 0.11}, 2)],
)
def test_warmup_is_counted_in_optimizer_steps(options: dict[str, Any], warmup: int) -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    accelerator.sync_gradients = True
    scheduler = make_scheduler(optimizer, TrainingSettings(learning_rate=1.0, **options), 10)
    for step in range(10):
        expected = step / warmup if step < warmup else (10 - step) / (10 - warmup)
        assert scheduler.get_last_lr() == pytest.approx([expected])
        optimizer.step()
        scheduler.step()
