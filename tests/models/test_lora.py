"""toolkit/models/lora.py, and merging LoRA in toolkit/checkpoint/model_folder.py."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from tests.faults import refusal
from tests.models.test_classifier import FAMILIES, SIZES, fault_of, load
from toolkit.checkpoint.model_folder import check_adapter, merge_lora, save_model
from toolkit.config import ModelSettings
from toolkit.models.lora import describe

LORA = {"lora_r": 4, "dropout": 0.0}


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_only_lora_and_the_head_are_trained(tiny_model: Path) -> None:
    model = load(tiny_model, **LORA)
    layers = [f"base_model.model.bert.encoder.layer.{layer}.attention.self.{name}.lora_{matrix}.default.weight"
              for layer in (0, 1) for name in ("query", "value") for matrix in "AB"]  # fmt: skip
    head = [
        f"base_model.model.classifier.modules_to_save.default.{name}" for name in ("weight", "bias")
    ]
    assert trained(model) == {*layers, *head}
    count = 8 * 4 * 33 + 3 * 34
    total = sum(tensor.numel() for tensor in load(tiny_model).parameters()) + 8 * 4 * 33
    line = f"LoRA r=4: {count:,} of {total:,} parameters are trained ({100 * count / total:.1f} %)"
    assert describe(model, ModelSettings(**LORA)) == line


@pytest.mark.parametrize(
    ("family", "head"),
    [("bert", {"classifier"}), ("roberta", {"classifier"}), ("deberta-v2", {"pooler", "classifier"}),
     ("distilbert", {"pre_classifier", "classifier"}), ("modernbert", {"head", "classifier"}),
     ("albert", {"classifier"}), ("convbert", {"classifier"})],
)  # fmt: skip
def test_modules_outside_the_encoder_are_fully_trained(
    family: str, head: set[str], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, **FAMILIES.get(family, SIZES))
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base", **LORA).eval()
    torch.manual_seed(9)
    with torch.no_grad():  # changes B, which starts at zero, and the head, as training would
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 * parameter.requires_grad)
    names = trained(model)
    assert {name.split(".")[2] for name in names if ".modules_to_save." in name} == head
    assert any(".lora_A." in name for name in names)
    assert not any(part in name for name in names for part in (".original_module.", ".base_layer."))
    model(input_ids=torch.arange(5, 29).view(2, 12)).logits.sum().backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )
    plain = merge_lora(model, model.state_dict())
    merged = copy.deepcopy(model).merge_and_unload()
    assert plain.keys() == merged.state_dict().keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in merged.state_dict().items())
    # rounded once
    save_model(Accelerator(cpu=True), model, None, tmp_path / "merged", dtype="bf16")
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(tensor, plain[name].to(tensor.dtype)), name


def test_factors_that_cannot_be_merged_are_named(tiny_model: Path) -> None:
    model = load(tiny_model, **LORA)
    check_adapter(model)
    config = model.peft_config["default"]
    for configs in ({"mine": config}, {"default": IA3Config()}):
        model.peft_config = configs
        refusal(check_adapter, model, says=["--lora_r", "merge_and_unload"])
    config.use_dora, model.peft_config = True, {"default": config}
    refusal(check_adapter, model, says=["use_dora"])


@pytest.mark.parametrize("settings", [{}, LORA])
def test_new_weights_depend_only_on_the_seed(tiny_model: Path, settings: dict[str, Any]) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.randn(seed + 7)  # earlier random numbers do not matter
        return dict(load(tiny_model, seed=seed, **settings).state_dict())

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    differ = {name for name in first if not torch.equal(first[name], other[name])}
    assert {".lora_A." in name or "classifier" in name for name in differ} == {True}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("querry", "(did you mean query?); it has dense, key, query, value, or all-linear"),
        ("classifier", "no linear layer of the encoder"),
        ("word_embeddings", "no linear layer of the encoder"),
        ("", "it has dense"),
    ],
)
def test_wrong_target_modules(tiny_model: Path, name: str, says: str) -> None:
    fault_of(tiny_model, lora_target_modules=name, **LORA, says=["--lora_target_modules", says])
