"""`--torch_compile`: equal numbers and names, few graphs; an error where it does not help."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config
from safetensors import safe_open
from transformers import BertConfig, BertModel, BigBirdConfig, BigBirdModel

from tests.faults import refusal
from tests.jobs_worker import run_jobs
from tests.runs import WAYS, losses_of
from tests.training.test_optimizer import accelerator_with
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.models.classifier import load_classifier
from toolkit.training.prepare import compile_layers

TINY = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


@pytest.fixture
def models(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two equal classifiers, the second of which is compiled."""
    compile_it = torch.nn.Module.compile  # a C++ compiler takes minutes
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda part, **how: compile_it(part, backend="aot_eager", **how)
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    labels = Labels("single_label_classification", ("a", "b"), ())
    settings = ModelSettings(model_name_or_path=str(tiny_model), dropout=0)
    plain, compiled = (load_classifier(settings, labels, 1).train() for _ in range(2))
    compile_layers(accelerator_with(), compiled)
    yield [plain, compiled]
    torch._dynamo.reset()


@pytest.mark.slow
def test_layers_are_compiled_in_place_for_any_length(models: list[Any]) -> None:
    plain, compiled = models
    assert list(compiled.state_dict()) == list(plain.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, compiled)]
    for step, (texts, width) in enumerate(
        [(3, 9), (4, 17), (2, 40), (1, 9), (5, 131), (3, 8), (3, 33), (7, 21)]
    ):
        ids = torch.randint(5, 127, (texts, width), generator=torch.Generator().manual_seed(step))
        inputs = {
            "input_ids": ids,
            **({"attention_mask": (ids % 9 > 0).long()} if step % 2 else {}),
        }
        losses = []
        for model, optimizer in zip((plain, compiled), optimizers, strict=True):
            loss = model.train()(**inputs).logits.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(
                compiled.eval()(**inputs).logits, plain.eval()(**inputs).logits
            )
    # two kinds of layers x training or not x a mask or none x several texts or one
    assert 2 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 16


def test_unsuitable_models_and_strategies() -> None:
    bert = BertModel(BertConfig(**TINY, vocab_size=9))
    sparse = BigBirdModel(BigBirdConfig(**TINY, vocab_size=9))
    for config, model, why in (({}, bert, "ZeRO-3 gathers each weight"), (None, sparse, "BigBird")):
        message = f"--torch_compile cannot be used: .*{why}.*leave it out"
        refusal(compile_layers, accelerator_with(config, stage=3), model, match=message)
    writer = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    refusal(compile_layers, accelerator_with(), writer, match="grows with each token of a title")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", "ddp x2", "zero2 x2", "fsdp2 x2"])
def test_runs_resume_with_and_without_it(way: str, tiny_job: list[str], tmp_path: Path) -> None:
    common = ["recipes.cls", *tiny_job, "--learning_rate", "3e-3", "--lr_scheduler_type", "constant",
              "--per_device_batch_size", 5, "--global_batch_size", 22, "--eval_every", 4]  # fmt: skip
    half, full = ["--max_steps", 4, "--checkpoint_every", 4], ["--max_steps", 8]
    jobs: list[list[Any]] = [[*common, *full, "--output_dir", tmp_path / "plain"]]
    for name, first, second in (("on", [], ["--torch_compile"]), ("off", ["--torch_compile"], [])):
        jobs += [[*common, *half, *first, "--output_dir", tmp_path / name],
                 [*common, *full, *second, "--output_dir", tmp_path / name]]  # fmt: skip
    log = run_jobs(tmp_path, WAYS[way], jobs, seconds=560).err
    assert re.search("torch_compile: on a CPU", log)
    for name in ("on", "off"):
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
        assert json.loads((tmp_path / name / "config.json").read_text())["settings"][
            "torch_compile"
        ] == (name == "on")
    with safe_open(tmp_path / "on" / "model" / "model.safetensors", "pt") as mine:
        assert not [key for key in mine.keys() if "_orig_mod" in key]  # noqa: SIM118
