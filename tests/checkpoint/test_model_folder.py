"""toolkit/checkpoint/model_folder.py with a model that is not from `transformers`."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.test_state import assert_same
from tests.faults import refusal
from toolkit.checkpoint.model_folder import DTYPES, load_weights, save_model


class Own(nn.Module):
    """No config, its own save, a tied weight, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(7)

    def save(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        sizes = [f"{name}={state_dict[name].numel()}" for name in sorted(state_dict)]
        (folder / "own.txt").write_text(" ".join(sizes))


@pytest.mark.parametrize(  # the last: LoRA, and not peft's
    "make",
    [
        Own,
        lambda seed: nn.Linear(2 + seed, 3),
        lambda seed: nn.ModuleDict({"lora_A": nn.Linear(2 + seed, 3)}),
    ],
)
def test_there_and_back(tmp_path: Path, make: Any) -> None:
    accelerator, model = Accelerator(cpu=True), make(1)
    for _ in range(2):  # the second replaces the first
        save_model(accelerator, model, None, tmp_path / "model")
    other = make(1)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    load_weights(accelerator, other, tmp_path / "model")
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def make_peft(base: Path, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query", "value"], **options)
    return get_peft_model(model, config)


def test_an_adapter_has_all_that_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    live, other = make_peft(tiny_model, bias="all"), make_peft(tiny_model, bias="all")
    for model in (live, other):
        model.get_submodule("base_model.model.bert.embeddings.LayerNorm").requires_grad_(True)
    trained = {
        name: torch.randn_like(each) for name, each in live.named_parameters() if each.requires_grad
    }
    live.load_state_dict(trained, strict=False)
    save_model(Accelerator(cpu=True), live, None, tmp_path / "model")
    load_weights(Accelerator(cpu=True), other, tmp_path / "model")
    theirs = PeftModel.from_pretrained(make_peft(tiny_model).unload(), tmp_path / "adapter")
    for model in (other, theirs):
        assert_same({name: model.state_dict()[name] for name in trained}, trained)


def test_its_own_save_gets_all_names(tmp_path: Path) -> None:
    save_model(Accelerator(cpu=True), Own(1), None, tmp_path / "model")
    assert "embed.weight=91 head.weight=91" in (tmp_path / "model" / "own.txt").read_text()
    assert "head.weight" not in load_file(tmp_path / "model" / "model.safetensors")  # tied: once


def test_a_number_too_large_for_fp16_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    model.weight.data[0, 0] = 7e4
    save = functools.partial(save_model, Accelerator(cpu=True), model, None, tmp_path / "model")
    refusal(save, dtype="fp16", says=["weight", "bf16"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_saved_dtype(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_model, dtype=torch.bfloat16)
    save_model(Accelerator(cpu=True), model, None, tmp_path / "model", dtype=dtype)
    again = AutoModel.from_pretrained(tmp_path / "model", dtype="auto")
    assert {tensor.dtype for tensor in again.parameters()} == {DTYPES[dtype]}
    assert torch.equal(next(again.parameters()).float(), next(model.parameters()).float())


def test_weights_that_a_recipe_ties(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_model)
    first, second = (layer.output.dense for layer in model.encoder.layer)
    second.weight = first.weight
    save_model(Accelerator(cpu=True), model, None, tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    assert torch.equal(again.encoder.layer[1].output.dense.weight, first.weight)
