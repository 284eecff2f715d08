"""toolkit/training: numbers of steps and micro-batches, loss normalisation, learning rates."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.faults import refusal
from tests.splits import of_lengths
from toolkit.config import TrainingSettings
from toolkit.data.batches import Batch
from toolkit.data.tokens import Split
from toolkit.objective.losses import sample_losses
from toolkit.training.optimizer import make_scheduler
from toolkit.training.schedule import make_schedule, max_micro_batches
from toolkit.training.steps import Step


@pytest.mark.parametrize(
    ("options", "samples", "steps_per_epoch", "total"),
    [({}, 100, 4, 12), ({"num_train_epochs": 0.5}, 100, 4, 2), ({"num_train_epochs": 0.3}, 100, 4, 2),
     ({"num_train_epochs": 2.5}, 96, 3, 8), ({"max_steps": 7}, 100, 4, 7),
     ({"max_steps": 7, "num_train_epochs": 1}, 100, 4, 7), ({"global_batch_size": 1}, 5, 5, 15),
     ({"global_batch_size": 1000}, 5, 1, 3)],
)  # fmt: skip
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
    says = (
        "--max_tokens_per_batch 99",
        "the longest text, which has 100 tokens",
        "--max_length 99",
    )
    refusal(max_micro_batches, TrainingSettings(max_tokens_per_batch=99), train, 1, says=says)
    max_micro_batches(TrainingSettings(max_tokens_per_batch=100), train, 1)


TOKENIZER = SimpleNamespace(pad_token_id=0, padding_side="right")


class Toy(torch.nn.Module):
    """Embeds a text as the mean of its tokens, and predicts two classes; `tokens` is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 5)
        self.classes = torch.nn.Linear(5, 2)
        self.tokens = torch.nn.Linear(5, 20)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The losses (B,)."""
        ids = batch.inputs["input_ids"]  # (B, S)
        mask = batch.inputs.get("attention_mask", torch.ones_like(ids))[..., None]  # (B, S, 1)
        text = (self.words(ids) * mask).sum(1) / mask.sum(1)  # (B, 5)
        return sample_losses(self.classes(text), batch.labels, "single_label_classification")


def split_of() -> Split:
    """50 texts of 1 to 40 tokens, with two classes."""
    generator = np.random.default_rng(5)
    offsets = np.cumsum([0, *generator.integers(1, 41, 50)])
    tokens = generator.integers(0, 20, offsets[-1]).astype(np.int32)
    return Split("train", Path(), tokens, offsets, generator.integers(0, 2, 50), np.arange(50))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [4, 8, 12]), ({"eval_every": 5}, [5, 10, 12]), ({"eval_every": 100}, [12]),
        ({"max_steps": 6}, [4, 6]),
    ],
)  # fmt: skip
def test_evaluations(options: dict[str, Any], steps: list[int]) -> None:
    schedule = make_schedule(TrainingSettings(**options), of_lengths(np.full(100, 8)))
    run: Any = SimpleNamespace(schedule=schedule)
    due = [
        Step(run, number, np.zeros(0), [], 1).evaluates
        for number in range(1, schedule.total_steps + 1)
    ]
    assert [number for number, evaluates in enumerate(due, 1) if evaluates] == steps


def test_a_step_has_no_attributes_of_a_recipe() -> None:
    step = Step(SimpleNamespace(), 1, np.zeros(0), [], 1)  # type: ignore[arg-type]
    step.grad_norm = 1.0
    with pytest.raises(AttributeError, match="grad_nrom"):
        step.grad_nrom = 1.0  # type: ignore[attr-defined]


def test_a_scheduler_is_one_of_the_prepared_optimizer() -> None:
    optimizer, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2))
    make = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=9)
    own = make(optimizer)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    assert make_scheduler(prepared, TrainingSettings(), 9, own).scheduler is own
    for wrong in (make(other), make):
        says = ["run.prepare(model, optimizer, scheduler)"]
        refusal(make_scheduler, prepared, TrainingSettings(), 9, wrong, says=says)


def rates(total: int, **options: Any) -> list[float]:
    settings = TrainingSettings(learning_rate=1.0, **options)
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    accelerator.sync_gradients = True
    scheduler = make_scheduler(optimizer, settings, total)
    values = []
    for _ in range(total):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize(
    ("options", "warmup"),
    [({}, 0), ({"warmup_steps": 3}, 3), ({"warmup_ratio": 0.2}, 2), ({"warmup_ratio": 0.11}, 2),
     ({"warmup_steps": 0}, 0), ({"warmup_ratio": 0.0}, 0)],
)  # fmt: skip
def test_warmup_is_counted_in_optimizer_steps(options: dict[str, Any], warmup: int) -> None:
    expected = [
        step / warmup if step < warmup else (10 - step) / (10 - warmup) for step in range(10)
    ]
    assert rates(10, **options) == pytest.approx(expected)
