"""LoRA: the merged model equals peft's, and the adapter folder loads in peft."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.handmade import assert_same, read_folder, write_run
from tests.checkpoint.test_convert import bert_config, convert
from tests.faults import refusal
from tests.runs import edit_json
from toolkit.checkpoint.tensor_index import model_checksum

pytestmark = pytest.mark.multiprocess


def make_peft(model: Path, **options: Any) -> Any:
    import peft
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    options = {"task_type": "SEQ_CLS", "r": 3, "lora_alpha": 5, "target_modules": ["query", "value"], **options}
    return peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options))


def saved(model: Any, folder: Path, base: Path, without_base: bool = False) -> Path:
    """A run's checkpoint of a live peft model (docs/checkpoints.md)."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    excluded = {name: list(tensors.pop(name).shape) for name in frozen} if without_base else {}
    write_run(folder, tensors, frozen=[] if without_base else frozen, excluded=excluded)
    model.peft_config["default"].save_pretrained(folder / "model")
    shutil.copytree(bert_config(base, folder / "config"), folder / "model", dirs_exist_ok=True)
    return folder


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"query": 5}, "alpha_pattern": {"layer.0.attention.self.value": 11}},
    "embedding": {"target_modules": ["word_embeddings", "dense"], "modules_to_save": ["pooler"]},
    "biases": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
}


@pytest.mark.usefixtures("built_in_a_fork")
@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_is_pefts_merge(variant: str, tiny_model: Path, tmp_path: Path) -> None:
    without_base = variant in ("plain", "embedding")
    live = make_peft(tiny_model, **VARIANTS[variant])
    run = saved(live, tmp_path / "run", tiny_model, without_base)
    if without_base:
        refusal(convert, run, tmp_path / "out", merge_lora=True, match="--base_model")
    base = tmp_path / "base"
    make_peft(tiny_model).unload().save_pretrained(base)
    message = convert(run, tmp_path / "out", merge_lora=True, base_model=base, verify=variant == "embedding")
    expected = live.merge_and_unload().state_dict()
    torch.testing.assert_close(read_folder(tmp_path / "out"), expected, rtol=1e-6, atol=1e-6)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    if variant == "embedding":
        assert "the sum with their adapter" in message[0]
        assert "BertForSequenceClassification" in message[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_adapter_folder_loads_in_peft(variant: str, tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    live = make_peft(tiny_model, **VARIANTS[variant])
    run = saved(live, tmp_path / "run", tiny_model)
    convert(run, tmp_path / "out", verify=True)
    live.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    torch.save(live.state_dict(), tmp_path / "state.pt")  # it does not record what was trained
    convert(tmp_path / "state.pt", tmp_path / "same", config_from=tmp_path / "theirs")
    ours, same, theirs = (read_folder(tmp_path / name) for name in ("out", "same", "theirs"))
    for unused in ("original_module", "modules_to_save") if variant == "all biases" else ():  # peft writes them too
        theirs.pop(f"base_model.model.classifier.{unused}.bias")
    same.pop("base_model.model.classifier.original_module.bias", None)
    assert_same(ours, theirs)
    assert_same(same, theirs)
    again = PeftModel.from_pretrained(make_peft(tiny_model).unload(), tmp_path / "out")
    state, expected = again.state_dict(), live.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected if "lora_" in name or "modules_to" in name)


def test_other_adapters_are_no_models(tmp_path: Path) -> None:
    save_file({"base_model.model.layer.ia3_l": torch.ones(3, 1)}, tmp_path / "adapter_model.safetensors")
    for merge_lora in (False, True):
        refusal(convert, tmp_path, tmp_path / "out", merge_lora=merge_lora, match="another kind than LoRA: only peft")


def by_hand(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """A run's checkpoint with an adapter."""
    run = write_run(folder, {f"base_model.model.x.{name}.weight": tensor for name, tensor in tensors.items()})
    (run / "model" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return run


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"r": 4}, "rank 4 for .* and the checkpoint 3"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        *(({"r": value}, "r is .* and should be") for value in (0, True, "3")),
        *(({"lora_alpha": value}, "lora_alpha is .* and should") for value in (None, True, 0, math.nan, math.inf, "5")),
        ({"rank_pattern": [3]}, "rank_pattern should be"),
        ({"rank_pattern": {"x": 0}}, "rank_pattern of x is 0"),
        ({"rank_pattern": {"(a+)+b": 3}}, "rank_pattern should be"),
        ({"alpha_pattern": {"x": math.nan}}, "alpha_pattern of x is nan"),
    ],
)
def test_what_cannot_be_merged_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    factors = {"lora_A.default": torch.ones(3, 5), "lora_B.default": torch.ones(7, 3), "base_layer": torch.ones(7, 5)}
    run = by_hand(tmp_path / "run", factors, **{"r": 3, "lora_alpha": 5, **content})
    refusal(convert, run, tmp_path / "out", merge_lora=True, match=message)
    assert not (tmp_path / "out").exists()


def test_a_base_model_that_has_changed_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    run, base = saved(make_peft(tiny_model), tmp_path / "run", tiny_model, without_base=True), tmp_path / "base"
    make_peft(tiny_model).unload().save_pretrained(base)
    edit_json(run / "manifest.json", base_model=str(base), identity={"model": model_checksum(base)})
    convert(run, tmp_path / "out", merge_lora=True)
    edit_json(base / "config.json", changed=True)
    refusal(convert, run, tmp_path / "other", merge_lora=True, match=f"{base} is not the base model .*--base_model")
    convert(run, tmp_path / "other", merge_lora=True, base_model=base)


def test_other_trained_parameters_are_not_lost_in_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    live = make_peft(tiny_model)
    next(p for name, p in live.named_parameters() if "LayerNorm.weight" in name).requires_grad_(True)
    run = saved(live, tmp_path / "run", tiny_model)
    message = r"LayerNorm.weight was trained and is not part of the adapter.*--merge_lora"
    refusal(convert, run, tmp_path / "out", match=message)
    convert(run, tmp_path / "out", merge_lora=True)


def test_fan_in_fan_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b, weight = torch.randn(2, 5), torch.randn(7, 2), torch.randn(5, 7)
    factors = {"lora_A.default": a, "lora_B.default": b, "base_layer": weight}
    run = by_hand(tmp_path / "run", factors, r=2, lora_alpha=3, fan_in_fan_out=True)
    convert(run, tmp_path / "out", merge_lora=True)
    assert torch.allclose(read_folder(tmp_path / "out")["x.weight"], weight + 1.5 * (b @ a).T, atol=1e-6)
