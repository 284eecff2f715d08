"""toolkit/models/lora.py, and merging LoRA in toolkit/checkpoint/model_folder.py."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from tests.faults import refusal
from tests.models.test_classifier import FAMILIES, SIZES, fault_of, load
from toolkit.checkpoint.model_folder import check_adapter, merge_lora, save_model

LORA = {"lora_r": 4, "dropout": 0.0}


HEADS = {"bert": {"classifier"}, "roberta": {"classifier"}, "deberta-v2": {"pooler", "classifier"},
         "distilbert": {"pre_classifier", "classifier"}, "modernbert": {"head", "classifier"},
         "albert": {"classifier"}, "convbert": {"classifier"}}  # fmt: skip


@pytest.mark.parametrize("family", HEADS)
def test_modules_outside_the_encoder_are_fully_trained(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **FAMILIES.get(family, SIZES))
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base", **LORA).eval()
    torch.manual_seed(9)
    with torch.no_grad():  # changes B, which starts at zero, and the head, as training would
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 * parameter.requires_grad)
    names = {name for name, each in model.named_parameters() if each.requires_grad}
    heads = {name.split(".")[2] for name in names if ".modules_to_save." in name}
    assert heads == HEADS[family]
    assert any(".lora_A." in name for name in names)
    assert not any(part in name for name in names for part in (".original_module.", ".base_layer."))
    model(input_ids=torch.arange(5, 29).view(2, 12)).logits.sum().backward()
    assert all(model.get_parameter(name).grad is not None for name in names)
    plain = merge_lora(model, model.state_dict())
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(plain, dict(merged.state_dict()), rtol=0, atol=0)
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


def test_wrong_target_modules(tiny_model: Path) -> None:
    for name, message in {
        "querry": "(did you mean query?); it has dense, key, query, value, or all-linear",
        "classifier": "no linear layer of the encoder",
    }.items():
        says = ["--lora_target_modules", message]
        fault_of(tiny_model, lora_target_modules=name, **LORA, says=says)
