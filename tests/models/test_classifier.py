"""toolkit/models/classifier.py: loading any classification checkpoint."""

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.faults import refusal
from tests.runs import edit_json
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.tokenizer import load_tokenizer
from toolkit.models.classifier import freeze_unused, load_classifier, set_dropout

SIZES = {
    "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 20,
    "vocab_size": 30,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": SIZES,
    "electra": SIZES | {"embedding_size": 12},
    "albert": SIZES | {"embedding_size": 12, "classifier_dropout_prob": 0.3},
    "deberta-v2": SIZES | {"pooler_dropout": 0.3},
    "distilbert": {"dim": 24, "n_heads": 2, "n_layers": 2, "hidden_dim": 20, "vocab_size": 30,
                   "seq_classif_dropout": 0.3},
    "modernbert": SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                           "sep_token_id": 2, "mlp_dropout": 0.3},
}  # fmt: skip


def classifier_of(family: str, sizes: dict[str, Any] | None = None, **options: Any) -> Any:
    """A random model of this family."""
    config = AutoConfig.for_model(family, **(sizes or FAMILIES.get(family, SIZES)), **options)
    return AutoModelForSequenceClassification.from_config(config)


def single(names: str) -> Labels:
    return Labels("single_label_classification", tuple(names), ("label",))


THREE = single("差中好")


def load(path: Path | str, labels: Labels = THREE, seed: int = 1, **settings: Any) -> Any:
    return load_classifier(ModelSettings(model_name_or_path=str(path), **settings), labels, seed)


def fault_of(path: Path | str, **settings: Any) -> str:
    return refusal(load, path, **settings)


@pytest.fixture
def broken(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "broken"))


# what is said of a saved head -> its classes, and the places of its outputs; none if it is new
HEADS: dict[str, tuple[Any, list[int]]] = {
    "kept": ("abc", [0, 1, 2]),
    "in the order of the data": ("cab", [1, 2, 0]),
    "new, as its classes were x, y, z": ("xyz", []),
    "new, as it had 4 classes": ("abcd", []),
    "kept by position": (["LABEL_0", "LABEL_1", "LABEL_2"], [0, 1, 2]),
}


@pytest.mark.parametrize("says", HEADS)
def test_a_saved_head(says: str, tmp_path: Path, caplog: Any) -> None:
    """The encoder is kept, and a new head is the seed's; in float32 also from bfloat16."""
    caplog.set_level("INFO", "toolkit")
    torch.manual_seed(5)
    saved, order = HEADS[says]
    trained = classifier_of("roberta", id2label=dict(enumerate(saved))).bfloat16()
    torch.nn.init.normal_(trained.classifier.out_proj.bias)
    trained.save_pretrained(tmp_path)
    one, two = (load(tmp_path, single("abc"), seed=3) for _ in range(2))
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    assert {(each.dtype, each.device.type) for each in one.parameters()} == {(torch.float32, "cpu")}
    encoder = trained.float().roberta.state_dict()
    torch.testing.assert_close(one.roberta.state_dict(), encoder, rtol=0, atol=0)
    mine, theirs = (model.classifier.out_proj for model in (one, trained))
    for name in ("weight", "bias"):
        expected = getattr(theirs, name)[order or [0, 1, 2]]
        assert torch.equal(getattr(mine, name), expected) == bool(order)
    assert len(caplog.messages) == 2
    assert all(says in line and str(tmp_path) in line for line in caplog.messages)


def test_an_adapter_beside_weights_is_not_applied(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "toolkit")
    trained = classifier_of("bert", id2label=dict(enumerate("abc")))
    config = peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(trained), config).save_pretrained(tmp_path)
    trained.save_pretrained(tmp_path)
    model = load(tmp_path, single("abc"))
    torch.testing.assert_close(model.state_dict(), trained.state_dict())
    assert "not applied" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_overrides_every_probability(family: str) -> None:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    set_dropout(config, 0.35)
    model = AutoModelForSequenceClassification.from_config(config)
    drops = [part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)]
    drops += [part.drop_prob for part in model.modules() if hasattr(part, "drop_prob")]
    assert set(drops) == {0.35}


def frozen(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_unused_parameters_are_frozen(tmp_path: Path) -> None:
    """And nothing else changes. BigBird's classifier reads no pooler."""
    model = classifier_of("bert").eval()
    model.spare = torch.nn.Linear(3, 5)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    freeze_unused(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert frozen(model) == {"spare.bias", "spare.weight"}
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    options = {"attention_type": "original_full", "sep_token_id": 3}
    classifier_of("big_bird", **options).save_pretrained(tmp_path)
    assert frozen(load(tmp_path)) == {"bert.pooler.weight", "bert.pooler.bias"}
    flash = "flash_attention_2"
    fault_of(tmp_path, attn_implementation=flash, says=["--attn_impl", flash, "It has auto"])


def write_nan(file: Path) -> None:
    weights = load_file(file)
    next(iter(weights.values()))[0] = torch.nan
    save_file(weights, file, {"format": "pt"})


BREAKS: dict[str, Callable[[Path], object]] = {
    "half the weights": lambda folder: os.truncate(folder / "model.safetensors", 9000),
    "not a number": lambda folder: write_nan(folder / "model.safetensors"),
    "half a config": lambda folder: os.truncate(folder / "config.json", 20),
    "an unknown model": lambda folder: edit_json(folder / "config.json", model_type="nosuch"),
    "not for texts": lambda folder: edit_json(folder / "config.json", model_type="vit"),
    # only the head may be new: a new encoder would be random
    "another size": lambda folder: edit_json(folder / "config.json", intermediate_size=50),
    "no layers": lambda folder: edit_json(folder / "config.json", num_hidden_layers=0),
    "more layers": lambda folder: edit_json(folder / "config.json", num_hidden_layers=1),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_folder_is_named(broken: Path, kind: str) -> None:
    BREAKS[kind](broken)
    fault_of(broken, says=[str(broken)])


def test_a_tokenizer_that_cannot_pad_or_is_missing(broken: Path) -> None:
    settings = ModelSettings(model_name_or_path=str(broken))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": None}
    edit_json(broken / "tokenizer_config.json", **kind)
    refusal(load_tokenizer, settings, match="no padding token")
    for path in (*broken.glob("tokenizer*"), broken / "vocab.txt"):
        path.unlink()
    refusal(load_tokenizer, settings, match=f"model {broken}")


def test_models_that_need_an_end_or_ignore_padding(tmp_path: Path) -> None:
    """BART reads the state of the last </s>; FNet mixes padding into the text: it takes no attention mask."""
    sides = {f"{side}_{size}": 2 for side in ("encoder", "decoder")
             for size in ("layers", "attention_heads", "ffn_dim")}  # fmt: skip
    classifier_of("bart", {"d_model": 24, "vocab_size": 120, **sides}).save_pretrained(tmp_path)
    assert load(tmp_path).config.num_labels == 3
    classifier_of("fnet", SIZES).save_pretrained(tmp_path / "fnet")
    fault_of(tmp_path / "fnet", says=["FNet"])
