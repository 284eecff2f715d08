"""Promise 2, for every size of the data up to two global batches plus 1: the ids of an evaluation, of lengths even and
uneven, in batches counted in samples and in tokens. Epochs of training: tests/data/test_batches.py.

It is a job of tests/matrix.py, too: `main`.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import inputs
from tests.matrix import runs
from tests.runs import slow_but
from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.tokens import Split
from toolkit.evaluation import Outputs
from toolkit.evaluation.outputs import BatchSizes
from toolkit.training.prepare import prepare_for_strategy

PER_DEVICE = {"single": 4, "ddp x2": 3, "ddp x3": 2, "zero3 x2": 2, "zero3 x3": 2}


@pytest.mark.parametrize("way", slow_but(PER_DEVICE, *list(PER_DEVICE)[:-1]))
def test_every_size(way: str) -> None:
    words = [inputs.tiny_model, PER_DEVICE[way]]
    runs(way).run("every size", "tests.test_exactly_once", words)
    assert "every sample exactly once" in runs(way).log("every size")


def main() -> None:
    model_path, per_device = sys.argv[1], int(sys.argv[2])
    accelerator = launch.make_accelerator("no")
    world = accelerator.num_processes
    largest = 2 * per_device * world + 1
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = TrainingSettings(global_batch_size=world, per_device_batch_size=1)
    model, _ = prepare_for_strategy(accelerator, settings, 1, model, optimizer)
    for size in range(1, largest + 1):
        # 24 tokens: batches of one, two or more samples, as their lengths allow
        for even, most in ((True, None), (False, None), (False, 24)):
            split = split_of(size, even)
            outputs = Outputs(accelerator, split, tokenizer, BatchSizes(per_device, most))
            for batch in outputs.batches(model):
                logits = model(**batch.inputs).logits
                assert not logits.requires_grad
                outputs.add(accelerator.gather_for_metrics((batch.ids, logits, batch.ids)))
            if in_order := outputs.in_order():
                rows, ids = in_order
                assert ids.tolist() == split.rows.tolist(), (size, even, most, ids)
                assert len(rows) == size
                assert size < 3 or len(np.unique(rows, axis=0)) > 1  # outputs belong to samples
    if accelerator.is_main_process:
        print(f"sizes 1 to {largest}: every sample exactly once", flush=True)


def split_of(size: int, even: bool) -> Split:
    """Random tokens; rows that are not 0..n-1, as after cleaning."""
    generator = np.random.default_rng(size)
    lengths = np.full(size, 6) if even else generator.integers(2, 17, size)
    flat = generator.integers(5, 40, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    labels, rows = generator.integers(0, 2, size), np.arange(size) * 3 + 1
    return Split("test", Path(), flat, offsets, labels, rows)
