"""`--half_precision_gradients` halves what a reduction sends, under every strategy, in fp32 as in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import WAYS, losses_of, recipe

REDUCTIONS = {"ddp x2": "allreduce", "zero1 x2": "allreduce", "zero2 x2": "allreduce",
              "zero3 x2": "reduce_scatter_base", "fsdp2 x2": "reduce_scatter_base"}  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", REDUCTIONS)
@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_half_the_bytes_and_nearly_the_losses(
    way: str, precision: str, tiny_model: Path, reviews: Path, tmp_path: Path
) -> None:
    losses, reduced = [], []
    for half in ("false", "true"):
        finished = recipe("--model_name_or_path", tiny_model, "--train_file", reviews, "--max_steps", 4,
                          "--report_to", "none", "--dropout", 0, "--global_batch_size", 16, "--per_device_batch_size",
                          4, "--learning_rate", "1e-3", "--warmup_ratio", 0, "--mixed_precision", precision,
                          "--half_precision_gradients", half, *WAYS[way], "--output_dir", tmp_path / half,
                          script="tests/ranks_worker.py")  # fmt: skip
        assert finished.code == 0, finished.err[-3000:]
        (file,) = (tmp_path / half).glob("sent-*.jsonl")
        losses.append(losses_of(tmp_path / half))
        reduced.append(json.loads(file.read_text().splitlines()[0])["asked"][REDUCTIONS[way]])
    assert reduced[1] == pytest.approx(reduced[0] / 2, rel=0.02)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0]
