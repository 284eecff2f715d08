"""A job of tests/test_exactly_once.py: counts every sample of many small sets.

    tests.once_worker: MODEL PER_DEVICE

For every size from 1 to two global batches plus 1, and for even and uneven lengths: which ids an
evaluation returns, and which ids a training epoch visits, bucketed and not, with batches counted in
samples and in tokens.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.tokens import Split
from toolkit.evaluation import Outputs
from toolkit.evaluation.outputs import BatchSizes
from toolkit.objective.losses import sample_losses
from toolkit.training.optimizer import make_scheduler, parameter_groups
from toolkit.training.prepare import prepare_for_strategy
from toolkit.training.schedule import make_schedule, max_micro_batches
from toolkit.training.steps import Steps

# Batches of one, two or more samples, as their lengths allow.
_MOST_TOKENS = 24


def main() -> None:
    model_path, per_device = sys.argv[1], int(sys.argv[2])
    accelerator = launch.make_accelerator("no")
    global_batch = per_device * accelerator.num_processes
    settings = TrainingSettings(
        global_batch_size=global_batch,
        per_device_batch_size=per_device,
        num_train_epochs=1,
        learning_rate=1e-4,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=2)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4)
    model, optimizer = prepare_for_strategy(accelerator, settings, 1, model, optimizer)
    scheduler = make_scheduler(optimizer, settings, 1000)
    for size in range(1, 2 * global_batch + 2):
        for even, most in ((True, None), (False, None), (False, _MOST_TOKENS)):
            split = fake_split(size, even)
            outputs = Outputs(accelerator, split, tokenizer, BatchSizes(per_device, most))
            for batch in outputs.batches(model):
                logits = model(**batch.inputs).logits
                assert not logits.requires_grad
                outputs.add(accelerator.gather_for_metrics((batch.ids, logits, batch.ids)))
            if found := outputs.in_order():
                rows, ids = found
                assert ids.tolist() == split.rows.tolist(), (size, even, most, ids)
                assert len(rows) == size
                # outputs belong to samples
                assert even or size < 3 or len(np.unique(rows, axis=0)) > 1
        for bucketed, most in ((True, None), (False, _MOST_TOKENS)):
            chosen = TrainingSettings(
                **{**vars(settings), "group_by_length": bucketed, "max_tokens_per_batch": most}
            )
            accumulation = max_micro_batches(chosen, split, accelerator.num_processes)
            accelerator.gradient_accumulation_steps = accumulation
            schedule = make_schedule(chosen, split)
            model._forward_pre_hooks.clear()  # the checks of the steps before
            steps = Steps(
                accelerator, split, tokenizer, chosen, schedule, model, optimizer, scheduler
            )
            seen: list[int] = []
            for step in steps:
                for count, batch in enumerate(step.micro_batches(model), 1):
                    assert count <= accumulation
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
            assert everyone == split.rows.tolist(), (size, bucketed, everyone)
    if accelerator.is_main_process:
        print(f"sizes 1 to {2 * global_batch + 1}: every sample exactly once", flush=True)


def fake_split(size: int, even: bool) -> Split:
    """Random tokens; rows that are not 0..n-1, as after cleaning."""
    generator = np.random.default_rng(size)
    lengths = np.full(size, 6) if even else generator.integers(2, 17, size)
    flat = generator.integers(5, 40, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Split(
        "test", Path(), flat, offsets, generator.integers(0, 2, size), np.arange(size) * 3 + 1
    )
