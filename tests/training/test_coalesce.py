"""ZeRO reduces gradients once per optimizer step; `--sync_each_batch true` after each micro-batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import WAYS, losses_of, recipe

MICRO_BATCHES = 8
REDUCTIONS = {"zero2 x2": "allreduce", "zero3 x2": "reduce_scatter_base"}


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", REDUCTIONS)
def test_bytes_of_a_step_do_not_grow_with_its_micro_batches(
    way: str, tiny_model: Path, reviews: Path, tmp_path: Path
) -> None:
    losses, asked = {}, {}
    once, each = [], ["--sync_each_batch", "true"]
    half = ["--mixed_precision", "bf16", "--half_precision_weights", "true"]
    for name, more in {"once": once, "each": each, "half": half, "half each": [*half, *each]}.items():
        finished = recipe("--model_name_or_path", tiny_model, "--train_file", reviews, "--max_steps", 3,
                          "--report_to", "none", "--dropout", 0, "--global_batch_size", 2 * MICRO_BATCHES,
                          "--per_device_batch_size", 1, "--mixed_precision", "no", *more, *WAYS[way],
                          "--output_dir", tmp_path / name, script="tests/ranks_worker.py")  # fmt: skip
        assert finished.code == 0, finished.err[-3000:]
        (file,) = (tmp_path / name).glob("sent-*.jsonl")
        losses[name], asked[name] = losses_of(tmp_path / name), json.loads(file.read_text().splitlines()[0])["asked"]
    reduced = {name: counts[REDUCTIONS[way]] for name, counts in asked.items()}
    assert losses["once"] == pytest.approx(losses["each"], rel=1e-6)
    assert reduced["each"] == pytest.approx(MICRO_BATCHES * reduced["once"], rel=0.01)
    # gradients of weights in bf16 would add up in bf16
    assert reduced["half"] == reduced["half each"]
    assert losses["half"] == losses["half each"]
