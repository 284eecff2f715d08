"""toolkit/training/schedule.py: numbers of steps and micro-batches, evaluations, learning rates."""

from functools import partial
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
from toolkit.training.schedule import make_schedule, max_micro_batches
from toolkit.training.steps import Step


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
    schedule = make_schedule(TrainingSettings(**options), of_lengths(np.full(samples, 8)))
    assert (schedule.steps_per_epoch, schedule.total_steps) == (steps_per_epoch, total)


@pytest.mark.parametrize(
    ("per_device", "processes", "accumulation"),
    [(32, 1, 1), (8, 1, 4), (8, 2, 2), (8, 4, 1), (8, 3, 2), (5, 1, 7), (100, 2, 1), (1, 64, 1)],
)
def test_accumulation(per_device: int, processes: int, accumulation: int) -> None:
    settings = TrainingSettings(global_batch_size=32, per_device_batch_size=per_device)
    train = of_lengths(np.full(1000, 8))
    assert max_micro_batches(settings, train, processes) == accumulation


def test_a_text_longer_than_any_batch() -> None:
    train = of_lengths(np.array([8, 100, 30]))
    says = ("--max_tokens_per_batch 99", "100 tokens", "--max_length 99")
    refusal(max_micro_batches, TrainingSettings(max_tokens_per_batch=99), train, 1, says=says)
    max_micro_batches(TrainingSettings(max_tokens_per_batch=100), train, 1)


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
    schedule = make_schedule(TrainingSettings(**options), of_lengths(np.full(100, 8)))
    run: Any = SimpleNamespace(schedule=schedule)
    numbers = range(1, schedule.total_steps + 1)
    assert [n for n in numbers if Step(run, n, np.zeros(0), [], 1).evaluates] == steps


def test_a_scheduler_is_one_of_the_prepared_optimizer() -> None:
    optimizer, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2))
    make = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=9)
    own = make(optimizer)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    assert make_scheduler(prepared, TrainingSettings(), 9, own).scheduler is own
    for wrong in (make(other), make):
        says = ["run.prepare(model, optimizer, scheduler)"]
        refusal(make_scheduler, prepared, TrainingSettings(), 9, wrong, says=says)
