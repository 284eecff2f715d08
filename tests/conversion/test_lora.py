"""LoRA: the merged model is peft's, and the adapter's folder loads in peft. (Promise 4.)"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit
from tests.conversion.test_files import write_run
from tests.conversion.test_real_folders import assert_equal, bert_config, read_folder
from tests.faults import refusal
from tests.runs import edit_json
from toolkit.training.resume import digest_of_model


def make_peft(model: Path, **options: Any) -> Any:
    import peft
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    options = {
        "task_type": "SEQ_CLS",
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["query", "value"],
        **options,
    }
    return peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"query": 5},
        "alpha_pattern": {"layer.0.attention.self.value": 11},
    },
    "embedding": {"target_modules": ["word_embeddings", "dense"], "modules_to_save": ["pooler"]},
    "biases": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
}


@pytest.fixture
def base(tiny_model: Path, tmp_path: Path) -> Path:
    """The base model, with the head that `make_peft` draws."""
    make_peft(tiny_model).unload().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def saved(live: Any, folder: Path, tiny_model: Path, **state: Any) -> Path:
    """A run's checkpoint of a live peft model, without what is frozen."""
    tensors = {
        name: parameter.detach()
        for name, parameter in live.named_parameters()
        if parameter.requires_grad
    }
    excluded = {
        name: list(parameter.shape)
        for name, parameter in live.named_parameters()
        if not parameter.requires_grad
    }
    config = bert_config(tiny_model, folder.with_name("config"))
    live.peft_config["default"].save_pretrained(config)
    return write_run(folder, tensors, config, excluded=excluded, **state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_is_pefts_merge(variant: str, tiny_model: Path, base: Path, tmp_path: Path) -> None:
    live = make_peft(tiny_model, **VARIANTS[variant])
    run = saved(live, tmp_path / "run", tiny_model)
    live.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    refusal(toolkit.convert, run, tmp_path / "out", merge_lora=True, says=["--base_model"])
    refusal(
        toolkit.convert,
        tmp_path / "adapter",
        tmp_path / "out",
        says=["--merge_lora", "--base_model"],
    )
    torch.save(live.state_dict(), tmp_path / "whole.pt")
    expected = {
        name: tensor.clone() for name, tensor in live.merge_and_unload().state_dict().items()
    }
    sources = {"run": {}, "adapter": {}, "whole.pt": {"config_from": tmp_path / "config"}}
    for name, options in sources.items():
        out = tmp_path / f"out of {name}"
        toolkit.convert(tmp_path / name, out, merge_lora=True, base_model=base, **options)
        torch.testing.assert_close(read_folder(out), expected, rtol=1e-6, atol=1e-6)
        assert not (out / "adapter_config.json").exists()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_adapter_folder_loads_in_peft(
    variant: str, tiny_model: Path, base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    live = make_peft(tiny_model, **VARIANTS[variant])
    live.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    theirs = {
        name: each for name, each in theirs.items() if "modules" not in name.replace("_to", "")
    }
    for unused in ("original_module", "modules_to_save"):  # peft writes them too
        theirs.pop(f"base_model.model.classifier.{unused}.bias", None)
    torch.save(live.state_dict(), tmp_path / "state.pt")
    toolkit.convert(tmp_path / "state.pt", tmp_path / "same", config_from=tmp_path / "theirs")
    toolkit.convert(saved(live, tmp_path / "run", tiny_model), tmp_path / "out")
    assert_equal(read_folder(tmp_path / "out"), theirs)
    assert_equal(read_folder(tmp_path / "same"), theirs)
    again = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base), tmp_path / "out"
    )
    state, expected = again.state_dict(), live.state_dict()
    assert all(
        torch.equal(state[name], expected[name])
        for name in expected
        if "lora_" in name or "modules_to" in name
    )


def test_what_cannot_be_merged_is_refused(tiny_model: Path, base: Path, tmp_path: Path) -> None:
    live = make_peft(tiny_model)
    live.save_pretrained(tmp_path / "adapter")
    faults: dict[str, dict[str, Any]] = {
        "of shape [4, 33]": {"r": 4},
        "pissa": {"init_lora_weights": "pissa"},
        "key.lora_A": {"target_modules": ["query", "value", "key"]},
        "does not promise": {"target_modules": ["query"]},
        "does not promise ": {"peft_type": "IA3"},
    }
    for fault, change in faults.items():
        copy = shutil.copytree(tmp_path / "adapter", tmp_path / "changed", dirs_exist_ok=True)
        edit_json(copy / "adapter_config.json", **change)
        out = tmp_path / "out"
        refusal(toolkit.convert, copy, out, merge_lora=True, base_model=base, says=[fault.strip()])
        assert not out.exists()


def test_what_was_trained_beside_the_adapter_is_not_lost(
    tiny_model: Path, base: Path, tmp_path: Path
) -> None:
    live = make_peft(tiny_model)
    next(
        each for name, each in live.named_parameters() if "LayerNorm.weight" in name
    ).requires_grad_(True)
    identity = {"model": digest_of_model(base)}
    run = saved(live, tmp_path / "run", tiny_model, base_model=str(base), identity=identity)
    refusal(
        toolkit.convert,
        run,
        tmp_path / "out",
        says=["LayerNorm.weight was trained", "--merge_lora"],
    )
    toolkit.convert(run, tmp_path / "out", merge_lora=True)  # the run's own base model
    edit_json(base / "config.json", changed=True)
    refusal(
        toolkit.convert, run, tmp_path / "other", merge_lora=True, says=[str(base), "has changed"]
    )


def test_other_adapters_are_no_models(tmp_path: Path) -> None:
    save_file(
        {"base_model.model.layer.ia3_l": torch.ones(3, 1)}, tmp_path / "adapter_model.safetensors"
    )
    refusal(toolkit.convert, tmp_path, tmp_path / "out", says=["adapter"])
