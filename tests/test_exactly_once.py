"""Promise 2, for every size of the data up to two global batches plus 1: which ids an evaluation returns, and which ids
an epoch of training visits: lengths even and uneven, bucketed and not, batches counted in samples and in tokens.

It is a job of tests/matrix.py, too: `main`.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.utils import gather_object
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import inputs
from tests.matrix import runs
from tests.runs import slow_but
from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.tokens import Split
from toolkit.evaluation import Outputs
from toolkit.evaluation.outputs import BatchSizes
from toolkit.objective.losses import sample_losses
from toolkit.training.optimizer import make_scheduler, parameter_groups
from toolkit.training.prepare import prepare_for_strategy
from toolkit.training.schedule import make_schedule
from toolkit.training.steps import Steps

PER_DEVICE = {"single": 4, "ddp x2": 3, "ddp x3": 2, "zero3 x2": 2, "zero3 x3": 2}
MOST_TOKENS = 24
"""Batches of one, two or more samples, as their lengths allow."""


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", slow_but(PER_DEVICE, *list(PER_DEVICE)[:-1]))
def test_every_size(way: str) -> None:
    words = [inputs.tiny_model, PER_DEVICE[way]]
    runs(way).run("every size", "tests.test_exactly_once", words)
    assert "every sample exactly once" in runs(way).log("every size")


def main() -> None:
    model_path, per_device = sys.argv[1], int(sys.argv[2])
    accelerator = launch.make_accelerator("no")
    global_batch = per_device * accelerator.num_processes
    settings = TrainingSettings(
        global_batch_size=global_batch, per_device_batch_size=per_device, num_train_epochs=1
    )
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=2)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4)
    largest = split_of(2 * global_batch + 1, even=True)
    schedule = make_schedule(settings, largest, accelerator.num_processes)
    model, optimizer = prepare_for_strategy(accelerator, settings, schedule, model, optimizer)
    scheduler = make_scheduler(optimizer, settings, 1000)

    def evaluate(split: Split, most: int | None) -> None:
        outputs = Outputs(accelerator, split, tokenizer, BatchSizes(per_device, most))
        for batch in outputs.batches(model):
            logits = model(**batch.inputs).logits
            assert not logits.requires_grad
            outputs.add(accelerator.gather_for_metrics((batch.ids, logits, batch.ids)))
        if in_order := outputs.in_order():
            rows, ids = in_order
            assert ids.tolist() == split.rows.tolist(), (len(split), most, ids)
            assert len(rows) == len(split)
            # outputs belong to samples
            assert len(split) < 3 or len(np.unique(rows, axis=0)) > 1

    def train(split: Split, bucketed: bool, most: int | None) -> None:
        chosen = dataclasses.replace(settings, group_by_length=bucketed, max_tokens_per_batch=most)
        schedule = make_schedule(chosen, split, accelerator.num_processes)
        accelerator.gradient_accumulation_steps = schedule.accumulation
        model._forward_pre_hooks.clear()  # the checks of the steps before
        steps = Steps(accelerator, split, tokenizer, chosen, schedule, model, optimizer, scheduler)
        seen: list[int] = []
        for step in steps:
            for count, batch in enumerate(step.micro_batches(model), 1):
                assert count <= schedule.accumulation
                assert most is None or batch.inputs["input_ids"].numel() <= most
                seen += batch.ids[batch.weights > 0].tolist()
                logits = model(**batch.inputs).logits
                losses = sample_losses(logits, batch.labels, "single_label_classification")
                accelerator.backward(step.mean(losses))
            step.grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            list(steps.finish(step))
        everyone = sorted(gather_object(seen))
        assert everyone == split.rows.tolist(), (len(split), bucketed, everyone)

    for size in range(1, 2 * global_batch + 2):
        uneven = split_of(size, even=False)
        evaluate(split_of(size, even=True), None)
        for most in (None, MOST_TOKENS):
            evaluate(uneven, most)
            train(uneven, bucketed=most is None, most=most)
    if accelerator.is_main_process:
        print(f"sizes 1 to {2 * global_batch + 1}: every sample exactly once", flush=True)


def split_of(size: int, even: bool) -> Split:
    """Random tokens; rows that are not 0..n-1, as after cleaning."""
    generator = np.random.default_rng(size)
    lengths = np.full(size, 6) if even else generator.integers(2, 17, size)
    flat = generator.integers(5, 40, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    labels, rows = generator.integers(0, 2, size), np.arange(size) * 3 + 1
    return Split("test", Path(), flat, offsets, labels, rows)
