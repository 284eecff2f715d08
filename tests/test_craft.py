"""Settings of the loss, the optimizer and layers: resumed runs, the average of the weights, frozen layers, pages. Equal
losses under every launch: tests/test_sameness.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.matrix import JOBS, runs
from tests.runs import lines_of, losses_of

STEPS, HALF = 3, 2
# stopped and resumed under each way; under DDP an optimizer that ZeRO does not support
RESUMED = {"single": ("weights", "momentum", "adafactor"), "ddp x2": ("adafactor",),
           "zero2 x2": ("weights", "momentum"), "zero3 x2": ("weights", "momentum"),
           "fsdp2 x2": ("weights", "momentum")}  # fmt: skip
MARKS = {"single": (), "zero3 x2": (pytest.mark.multiprocess, pytest.mark.slow),
         "fsdp2 x2": (pytest.mark.multiprocess, pytest.mark.slow)}  # fmt: skip


def run(way: str, name: str, kind: str, *more: Any) -> Path:
    job = JOBS[name]
    return runs(way).run(f"{name} {kind}", job.recipe, [*job.words, *more])


def saved(way: str, name: str) -> Path:
    """The checkpoint of a run that stopped after `HALF` steps."""
    folder = run(way, name, "half", "--max_steps", HALF, "--checkpoint_every", HALF)
    return folder / "checkpoints" / f"step-{HALF:08d}"


def assert_continues(resumed: Path, whole: Path, close: float) -> None:
    assert losses_of(resumed) == pytest.approx(losses_of(whole)[HALF:], rel=close)
    lines = (lines_of(folder / "eval.jsonl") for folder in (resumed, whole))
    mine, theirs = ([line["loss"] for line in each if line["step"] == STEPS][:1] for each in lines)
    assert mine == pytest.approx(theirs, rel=close)


@pytest.mark.parametrize(
    ("way", "name"),
    [pytest.param(way, name, marks=MARKS.get(way, (pytest.mark.multiprocess,)))
     for way, names in RESUMED.items() for name in names],
)  # fmt: skip
def test_a_resumed_run_continues_the_uninterrupted_one(way: str, name: str) -> None:
    assert_continues(run(way, name, "resumed", "--resume", saved(way, name)), runs(way)[name], 1e-6)


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["zero2 x2", pytest.param("zero3 x2", marks=pytest.mark.slow)])
def test_the_average_moves_to_another_strategy(way: str) -> None:
    moved = run("single", "weights", f"from {way}", "--resume", saved(way, "weights"))
    assert_continues(moved, runs("single")["weights"], 1e-5)


def test_the_average_is_evaluated_and_saved() -> None:
    """Compared with the average of the weights in the checkpoints of steps 1 to 3."""
    folder = run("single", "weights", "each step", "--max_steps", 3, "--eval_every", 3, "--checkpoint_every", 1,
                 "--keep_checkpoints", 9)  # fmt: skip
    weights = [
        load_file(folder / f"checkpoints/step-{step:08d}/weights.safetensors")
        for step in range(1, 4)
    ]
    saved_model = load_file(folder / "model" / "model.safetensors")
    for name, first in weights[0].items():
        expected = first
        for step in (2, 3):
            expected = torch.lerp(
                expected, weights[step - 1][name], 1 - min(0.6, (1 + step) / (10 + step))
            )
        torch.testing.assert_close(saved_model[name], expected, rtol=1e-6, atol=1e-7)
        assert name == "bert.embeddings.word_embeddings.weight" or not torch.equal(
            saved_model[name], weights[2][name]
        )
