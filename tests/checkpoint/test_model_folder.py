"""toolkit/checkpoint/model_folder.py: models that are not from `transformers`, tied weights, adapters, dtypes.
(Promise 4.)"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.checkpoint.states import Odd, State, assert_same
from toolkit.checkpoint.model_folder import DTYPES, load_weights, save_model


class Own(Odd):
    """No config, its own save, a tied weight, buffers."""

    def save(self, folder: Path, state_dict: State) -> None:
        sizes = [f"{name}={state_dict[name].numel()}" for name in sorted(state_dict)]
        (folder / "own.txt").write_text(" ".join(sizes))


MODELS = [Own(), nn.Linear(3, 3), nn.ModuleDict({"lora_A": nn.Linear(3, 3)})]  # no LoRA of peft


@pytest.mark.parametrize("model", MODELS)
def test_there_and_back(tmp_path: Path, model: nn.Module) -> None:
    folder, accelerator = tmp_path / "model", Accelerator(cpu=True)
    for _ in range(2):  # the second replaces the first
        save_model(accelerator, model, None, folder)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    load_weights(accelerator, model, folder)
    assert_same(dict(model.state_dict()), expected)
    assert list(tmp_path.iterdir()) == [folder]
    if isinstance(model, Own):  # its own save gets all names, and a tied weight is written once
        assert "embed.weight=91 first.bias" in (folder / "own.txt").read_text()
        assert "head.weight=91" in (folder / "own.txt").read_text()
        assert "head.weight" not in load_file(folder / "model.safetensors")


def make_peft(base: Path, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query", "value"], **options)
    return get_peft_model(model, config)


def test_an_adapter_has_all_that_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    live, other = make_peft(tiny_model, bias="all"), make_peft(tiny_model, bias="all")
    for model in (live, other):
        model.get_submodule("base_model.model.bert.embeddings.LayerNorm").requires_grad_(True)
    parameters = live.named_parameters()
    trained = {name: torch.randn_like(each) for name, each in parameters if each.requires_grad}
    live.load_state_dict(trained, strict=False)
    save_model(Accelerator(cpu=True), live, None, tmp_path / "model")
    load_weights(Accelerator(cpu=True), other, tmp_path / "model")
    theirs = PeftModel.from_pretrained(make_peft(tiny_model).unload(), tmp_path / "adapter")
    for model in (other, theirs):
        assert_same({name: model.state_dict()[name] for name in trained}, trained)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_saved_dtype(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    """Also of a weight that only the recipe ties."""
    model = AutoModel.from_pretrained(tiny_model, dtype=torch.bfloat16)
    first, second = (layer.output.dense for layer in model.encoder.layer)
    second.weight = first.weight
    save_model(Accelerator(cpu=True), model, None, tmp_path / "model", dtype=dtype)
    again = AutoModel.from_pretrained(tmp_path / "model", dtype="auto")
    assert {tensor.dtype for tensor in again.parameters()} == {DTYPES[dtype]}
    assert_same(dict(again.float().state_dict()), dict(model.float().state_dict()))
