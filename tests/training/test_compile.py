"""`--torch_compile`: equal numbers and names, few graphs; an error where it does not help."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, BigBirdConfig, BigBirdModel

from tests import inputs
from tests.faults import refusal
from tests.matrix import TINY, runs
from tests.models.test_classifier import SIZES, load
from tests.runs import losses_of
from tests.training.test_optimizer import accelerator_with
from toolkit.training.prepare import compile_layers

WORDS = [*TINY, "--train_file", inputs.reviews, "--learning_rate", "3e-3", "--lr_scheduler_type",
         "constant", "--per_device_batch_size", 5, "--global_batch_size", 22, "--eval_every", 4]  # fmt: skip
SHAPES = [(3, 9), (4, 17), (2, 40), (1, 9), (5, 131), (3, 8), (3, 33), (7, 21)]


@pytest.mark.slow
def test_layers_are_compiled_in_place_for_any_length(tiny_model: Path, monkeypatch: Any) -> None:
    compile_it = torch.nn.Module.compile  # a C++ compiler takes minutes
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda part, **how: compile_it(part, backend="aot_eager", **how)
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = (load(tiny_model, dropout=0) for _ in range(2))
    compile_layers(accelerator_with(), compiled)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for step, shape in enumerate(SHAPES):
        ids = torch.randint(5, 127, shape, generator=torch.Generator().manual_seed(step))
        inputs = {"input_ids": ids}
        if step % 2:
            inputs["attention_mask"] = (ids % 9 > 0).long()
        for training in (True, False):
            with torch.set_grad_enabled(training):
                theirs, ours = (each.train(training)(**inputs).logits for each in (plain, compiled))
            torch.testing.assert_close(ours, theirs)
            if training:
                ours.sum().backward()
    # two kinds of layers x training or not x a mask or none x several texts or one
    assert 2 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 16
    torch._dynamo.reset()


def test_unsuitable_models_and_strategies() -> None:
    bert, sparse = BertModel(BertConfig(**SIZES)), BigBirdModel(BigBirdConfig(**SIZES))
    writer = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    zero3 = accelerator_with({}, stage=3)
    refusal(compile_layers, zero3, bert, says=["--torch_compile", "ZeRO-3 gathers each weight"])
    refusal(compile_layers, accelerator_with(), sparse, says=["BigBird"])
    refusal(compile_layers, accelerator_with(), writer, says=["grows with each token of a title"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["single", "ddp x2", "zero2 x2", "fsdp2 x2"])
def test_runs_resume_with_and_without_it(way: str) -> None:
    def run(name: str, *more: Any) -> Path:
        return runs(way).run(f"compile {name}", "recipes.cls", [*WORDS, *more])

    on = ["--torch_compile"]
    whole = run("no", "--max_steps", 8)
    for name, first, second in (("on", [], on), ("off", on, [])):
        half = run(f"half {name}", *first, "--max_steps", 4, "--checkpoint_every", 4)
        last = half / "checkpoints" / "last"
        resumed = run(f"resumed {name}", *second, "--max_steps", 8, "--resume", last)
        assert losses_of(half) + losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-5)
        weights = [load_file(each / "model" / "model.safetensors") for each in (resumed, whole)]
        assert weights[0].keys() == weights[1].keys()
    assert "torch_compile: on a CPU" in runs(way).log("compile resumed on")
