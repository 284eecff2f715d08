"""LoRA: the converted model is the one that peft merges. (Promise 4.)"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForPreTraining as Pretrained
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer

import toolkit
from tests.checkpoint.states import adapted, make_peft
from tests.conversion.test_files import bert_config, old_names, read_folder, write_run
from tests.faults import refusal
from tests.runs import edit_json
from toolkit.conversion import lora

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"query": 5}, "alpha_pattern": {"layer.0.attention.self.value": 11}},
    "embedding": {"target_modules": ["word_embeddings", "dense"], "modules_to_save": ["pooler"]},
    "biases": {"bias": "all"},
}


@pytest.fixture
def base(tiny_model: Path, tmp_path: Path) -> Path:
    """The base model, with the head that `make_peft` draws."""
    make_peft(tiny_model).unload().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_pefts_merge(variant: str, tiny_model: Path, base: Path, tmp_path: Path) -> None:
    """Of a run's checkpoint, of an adapter, and of a whole state dict."""
    live = make_peft(tiny_model, **VARIANTS[variant])
    # what was trained beside the adapter is not lost
    norm = live.get_submodule("base_model.model.bert.embeddings.LayerNorm")
    norm.weight.requires_grad_(True)
    config = bert_config(tiny_model, tmp_path / "config")
    live.peft_config["default"].save_pretrained(config)
    trained = {name: each.detach() for name, each in live.named_parameters() if each.requires_grad}
    frozen = {name: [] for name, each in live.named_parameters() if not each.requires_grad}
    write_run(tmp_path / "run", trained, config, excluded=frozen, base_model="bert-base-chinese")
    refusal(toolkit.convert, tmp_path / "run", tmp_path / "x", says=["bert-base", "--base_model"])
    live.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    torch.save(live.state_dict(), tmp_path / "whole.pt")
    expected = {name: each.clone() for name, each in live.merge_and_unload().state_dict().items()}
    for name, config_from in (("run", None), ("adapter", None), ("whole.pt", config)):
        out = tmp_path / f"out of {name}"
        toolkit.convert(tmp_path / name, out, base_model=base, config_from=config_from)
        torch.testing.assert_close(read_folder(out), expected, rtol=1e-6, atol=1e-6)


CHANGES: dict[str, dict[str, Any]] = {
    "[4, 33]": {"r": 4},
    "pissa": {"init_lora_weights": "pissa"},
    "key.lora_A": {"target_modules": ["query", "value", "key"]},
    "value.lora_A": {"target_modules": ["query"]},
    "IA3": {"peft_type": "IA3"},
    "FUTURE": {"peft_type": "FUTURE"},
    "merge it with peft": {"trainable_token_indices": [1]},
    "unterminated": {"target_modules": "(("},
    "should be a positive": {"r": 0},
    "not done after": {"exclude_modules": "((.*)*)*x"},
}


def test_what_cannot_be_merged_is_refused(
    tiny_model: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "_SECONDS", 0.5)
    adapter = tmp_path / "adapter"
    make_peft(tiny_model).save_pretrained(adapter)
    refusal(toolkit.convert, adapter, tmp_path / "out", says=["base model", "--base_model"])
    refusal(toolkit.convert, adapter, tmp_path / "out", base_model=adapter, says=["is an adapter"])
    for fault, change in CHANGES.items():
        copy = shutil.copytree(tmp_path / "adapter", tmp_path / "changed", dirs_exist_ok=True)
        edit_json(copy / "adapter_config.json", **change)
        refusal(toolkit.convert, copy, tmp_path / "out", base_model=base, says=[fault])
    other = {"base_model.model.layer.ia3_l": torch.ones(3, 1)}
    save_file(other, tmp_path / "adapter_model.safetensors")
    refusal(toolkit.convert, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", ["today's", "of BERT's first checkpoints, and no task"])
def test_an_adapter_of_a_language_model(names: str, tiny_model: Path, tmp_path: Path) -> None:
    """It decides the class, the outputs and the tokens, and what its config promises must be there."""
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for saved in (tokenizer, Pretrained.from_pretrained(tiny_model)):
        saved.save_pretrained(base)
    if names != "today's":
        save_file(old_names(read_folder(base)), base / "model.safetensors", {"format": "pt"})
    tokenizer.add_tokens(["covid"])
    model = Classifier.from_pretrained(base, num_labels=3)
    model.resize_token_embeddings(len(tokenizer))
    live = adapted(model, modules_to_save=["classifier", "word_embeddings", "LayerNorm"]).eval()
    for saved in (tokenizer, live):
        saved.save_pretrained(adapter)
    if names != "today's":
        edit_json(adapter / "adapter_config.json", task_type=None)
    lines = toolkit.convert(adapter, out, base_model=base)
    assert any("id2label" in line for line in lines)
    inputs = AutoTokenizer.from_pretrained(out)(["a covid film"], return_tensors="pt")
    assert "covid" in inputs.tokens(0)
    merged = Classifier.from_pretrained(out).eval()
    assert (merged.config.num_labels, merged.config.vocab_size) == (3, len(tokenizer))
    torch.testing.assert_close(merged(**inputs).logits, live(**inputs).logits)
    edit_json(adapter / "adapter_config.json", task_type="SEQ_CLS")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in parts if ".classifier." in name]:
        del parts[name]
    save_file(parts, adapter / "adapter_model.safetensors", {"format": "pt"})
    says = ["classifier.weight", "modules_to_save"]
    refusal(toolkit.convert, adapter, tmp_path / "other", base_model=base, says=says)
    adapted(Classifier.from_pretrained(base)).save_pretrained(adapter)
    says = ["a token with id", "rows"]
    refusal(toolkit.convert, adapter, tmp_path / "other", base_model=base, says=says)
    assert not (tmp_path / "other").exists()


def test_a_config_of_another_task_gives_way(tiny_model: Path, tmp_path: Path) -> None:
    """A live config's `architectures` is still the base model's."""
    classifier = make_peft(tiny_model).unload()
    torch.save(classifier.state_dict(), tmp_path / "model.pt")
    config = bert_config(tiny_model, tmp_path / "config")
    edit_json(config / "config.json", architectures=["BertForMaskedLM"])
    toolkit.convert(tmp_path / "model.pt", tmp_path / "out", config_from=config)
    torch.testing.assert_close(read_folder(tmp_path / "out"), classifier.state_dict())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["BertForSequenceClassification"]
