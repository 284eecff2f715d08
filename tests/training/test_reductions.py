"""Bytes that a step sends to reduce gradients: once per optimizer step, unless `--sync_each_batch`; half as many with
`--half_precision_gradients`."""

from typing import Any

import pytest

from tests import inputs
from tests.matrix import TINY, runs
from tests.runs import lines_of, losses_of

REDUCTIONS = {"ddp x2": "allreduce", "zero1 x2": "allreduce", "zero2 x2": "allreduce",
              "zero3 x2": "reduce_scatter_base", "fsdp2 x2": "reduce_scatter_base"}  # fmt: skip
MICRO_BATCHES = 8
COMMON = [*TINY, "--train_file", inputs.reviews, "--global_batch_size", 16]


@pytest.mark.parametrize("way", ["zero2 x2", "zero3 x2"])
def test_bytes_of_a_step_do_not_grow_with_its_micro_batches(way: str) -> None:
    kinds = {"once": [], "each": ["--sync_each_batch", "true"]}
    settings = ["--max_steps", 2, "--per_device_batch_size", 16 // MICRO_BATCHES // 2]
    losses, reduced = losses_and_bytes(way, settings, kinds)
    assert losses["once"] == pytest.approx(losses["each"], rel=1e-6)
    assert reduced["each"] == pytest.approx(MICRO_BATCHES * reduced["once"], rel=0.01)


@pytest.mark.parametrize("way", REDUCTIONS)
@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_half_precision_gradients(way: str, precision: str) -> None:
    settings = ["--per_device_batch_size", 4, "--max_steps", 4, "--learning_rate", "1e-3", "--warmup_ratio", 0,
                "--mixed_precision", precision]  # fmt: skip
    kinds = {"full": [], "half": ["--half_precision_gradients", "true"]}
    losses, reduced = losses_and_bytes(way, settings, kinds)
    assert reduced["half"] == pytest.approx(reduced["full"] / 2, rel=0.02)
    assert losses["half"] == pytest.approx(losses["full"], rel=1e-2)
    assert losses["half"] != losses["full"]


def losses_and_bytes(
    way: str, settings: list[Any], kinds: dict[str, list[Any]]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The losses of a run of each kind, and the bytes of its reductions in a step."""
    losses, reduced = {}, {}
    for kind, more in kinds.items():
        words = [*COMMON, *settings, *more]
        name = f"bytes of {' '.join(map(str, settings + more))}"
        run = runs(way).run(name, "tests.training.test_waits", words)
        losses[kind] = losses_of(run)
        second = [note for part in lines_of(run / "notes.jsonl")[1].values() for note in part]
        reduced[kind] = sum(sent for operator, sent in second if REDUCTIONS[way] in operator)
    return losses, reduced
