"""The average of the weights, and the state of optimizers: resumed runs, other strategies, what is saved. Equal losses
under every launch: tests/test_sameness.py."""

import pytest
import torch
from safetensors.torch import load_file

from tests.matrix import JOBS, runs
from tests.runs import assert_same_run, slow_but
from tests.test_elastic import SAVED_AT, run

# (way that saves, job, way that resumes); under DDP an optimizer that ZeRO does not support
CASES = [("single", name, "single") for name in ("weights", "momentum", "adafactor")]
CASES += [("ddp x2", "adafactor", "ddp x2"), ("zero2 x2", "weights", "single")]
CASES += [("zero2 x2", name, "zero2 x2") for name in ("weights", "momentum")]
QUICK = len(CASES)
CASES += [(way, name, way) for way in ("zero3 x2", "fsdp2 x2") for name in ("weights", "momentum")]
CASES += [("zero3 x2", "weights", "single")]


@pytest.mark.parametrize("case", slow_but(CASES, *CASES[:QUICK]), ids=", ".join)
def test_a_resumed_run_continues_the_uninterrupted_one(case: tuple[str, str, str]) -> None:
    source, name, way = case
    assert_same_run(run(way, name, source), run("single", name), after=SAVED_AT)


def test_the_average_is_evaluated_and_saved() -> None:
    """Compared with the average of the weights in the checkpoints of steps 1 to 3."""
    every = ["--max_steps", 3, "--eval_every", 3, "--checkpoint_every", 1, "--keep_checkpoints", 9]
    words = [*JOBS["weights"].words, *every]
    folder = runs("single").run("weights of each step", "recipes.cls", words)
    files = [folder / f"checkpoints/step-{step:08d}/weights.safetensors" for step in (1, 2, 3)]
    average, second, third = map(load_file, files)
    saved = load_file(folder / "model" / "model.safetensors")
    for name in average:
        for step, weights in ((2, second), (3, third)):
            decay = min(0.6, (1 + step) / (10 + step))
            average[name] = torch.lerp(average[name], weights[name], 1 - decay)
        torch.testing.assert_close(saved[name], average[name], rtol=1e-6, atol=1e-7)
    head = "classifier.weight"
    assert not torch.equal(saved[head], third[head])
