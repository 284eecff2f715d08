"""A checkpoint of any strategy and world size resumes under any other, in the middle of an epoch: all weights, LoRA's
alone, in bf16, the average of the weights, the state of optimizers. (Promise 4.)"""

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.matrix import JOBS, REVIEWS, runs
from tests.runs import assert_same_run, losses_of, slow_but
from toolkit.checkpoint import folder as folders

ORDER = ["single", "zero2 x3", "ddp x2", "zero3 x2", "zero1 x2", "fsdp2 x2", "zero2 x2", "zero3 x3"]
CASES = [("full", source, way) for source, way in product(ORDER, ORDER)]
# from and to one process, to itself and to its neighbours
QUICK = [
    ("full", source, way)
    for source, way in product(ORDER[:-1], repeat=2)
    if "single" in (source, way) or abs(ORDER.index(source) - ORDER.index(way)) < 2
]
QUICK += [(name, "single", "single") for name in ("weights", "momentum", "adafactor")]
QUICK += [(name, "zero2 x2", "zero2 x2") for name in ("weights", "momentum")]
# under DDP, an optimizer that ZeRO does not support
QUICK += [("adafactor", "ddp x2", "ddp x2"), ("weights", "zero2 x2", "single")]
CASES += [(name, way, way) for way in ("zero3 x2", "fsdp2 x2") for name in ("weights", "momentum")]
CASES += [("weights", "zero3 x2", "single")]
STEPS, SAVED_AT = 6, 3
SIX_STEPS = ["--max_steps", STEPS, "--eval_every", STEPS, "--checkpoint_every", SAVED_AT]
# an epoch has 16 steps
FULL = [*REVIEWS, *SIX_STEPS, *"--per_device_batch_size 3 --learning_rate 1e-3".split()]
FULL += ["--warmup_steps", 2]
KINDS = {
    "full": FULL,
    "lora": [*FULL, "--lora_r", 4, "--learning_rate", "1e-2"],
    "bf16": [*FULL, "--mixed_precision", "bf16"],
    **{name: [*JOBS[name].words, *SIX_STEPS] for name in ("weights", "momentum", "adafactor")},
}


def run(way: str, kind: str = "full", source: str = "") -> Path:
    """A whole run, or one that resumes from the checkpoint of the way `source`."""
    words = [*KINDS[kind]]
    if source:
        words += ["--resume", lambda: saved(source, kind)]
    return runs(way).run(f"elastic {kind} {source}".strip(), "recipes.cls", words)


def saved(way: str, kind: str) -> Path:
    return folders.step_folder(run(way, kind) / "checkpoints", SAVED_AT)


@pytest.mark.parametrize("case", slow_but(dict.fromkeys([*QUICK, *CASES]), *QUICK), ids=", ".join)
def test_from_any_to_any(case: tuple[str, str, str]) -> None:
    kind, source, way = case
    assert_same_run(run(way, kind, source), run("single", kind), after=SAVED_AT)


@pytest.mark.parametrize("way", slow_but(["zero3 x2", "ddp x2", "zero2 x2"], "zero3 x2"))
def test_lora(way: str) -> None:
    """Checkpoints omit the base model's weights."""
    for source, target in (("single", way), (way, way), (way, "single")):
        assert_same_run(run(target, "lora", source), run("single", "lora"), after=SAVED_AT)
    for each in ("single", way):
        weights = load_file(saved(each, "lora") / folders.WEIGHTS_FILE)
        assert weights
        assert all(".lora_" in name or ".modules_to_save." in name for name in weights)
        excluded = folders.read_state(saved(each, "lora"))["excluded"]
        assert "base_model.model.bert.embeddings.word_embeddings.weight" in excluded


@pytest.mark.slow
@pytest.mark.parametrize("way", ["zero2 x2", "zero3 x2", "fsdp2 x2"])
def test_bf16(way: str) -> None:
    """Exactly under the same strategy, closely from another. Weights are saved in fp32, unrounded."""
    for source, rel in ((way, 1e-6), ("ddp x2", 2e-2)):
        expected = losses_of(run(source, "bf16"))[SAVED_AT:]
        assert losses_of(run(way, "bf16", source)) == pytest.approx(expected, rel=rel)
    last = folders.step_folder(run(way, "bf16") / "checkpoints", STEPS)
    assert folders.read_state(last)["mixed_precision"] == "bf16"
    masters = load_file(last / folders.WEIGHTS_FILE)
    for name, tensor in load_file(run(way, "bf16") / "model" / "model.safetensors").items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, masters[name])


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
