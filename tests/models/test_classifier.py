"""toolkit/models/classifier.py: loading any classification checkpoint."""

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.faults import refusal
from tests.runs import edit_json
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.tokenizer import load_tokenizer
from toolkit.models.classifier import freeze_unused, load_classifier, set_dropout

THREE = Labels("single_label_classification", ("差", "中", "好"), ("label",))
FIVE = Labels("single_label_classification", tuple("abcde"), ("label",))


def load(path: Path | str, labels: Labels = THREE, seed: int = 1, **settings: Any) -> Any:
    return load_classifier(ModelSettings(model_name_or_path=str(path), **settings), labels, seed)


def fault_of(path: Path | str, **settings: Any) -> str:
    return refusal(load, path, **settings)


@pytest.fixture
def broken(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "broken"))


def test_the_encoder_is_loaded_in_float32_also_from_bfloat16(
    tiny_model: Path, tmp_path: Path
) -> None:
    AutoModelForSequenceClassification.from_pretrained(
        tiny_model, dtype=torch.bfloat16
    ).save_pretrained(tmp_path)
    model, saved = load(tiny_model), load_file(tiny_model / "model.safetensors")
    assert all(
        torch.equal(parameter, saved[name]) for name, parameter in model.bert.named_parameters()
    )
    parameters = [*model.parameters(), *load(tmp_path).parameters()]
    assert {(each.dtype, each.device.type) for each in parameters} == {(torch.float32, "cpu")}


@pytest.mark.parametrize(
    ("labels", "outputs"),
    [(THREE, 3), (Labels("multi_label_classification", ("a", "b"), ("a", "b")), 2),
     (Labels("regression", ("stars",), ("stars",)), 1)],
)  # fmt: skip
def test_the_config_has_the_labels(tiny_model: Path, labels: Labels, outputs: int) -> None:
    model = load(tiny_model, labels)
    assert model.classifier.out_features == model.config.num_labels == outputs
    assert model.config.problem_type == labels.problem_type
    assert model.config.id2label == dict(enumerate(labels.names))
    assert model.config.label2id == {name: place for place, name in enumerate(labels.names)}


def test_a_head_of_another_size_is_replaced_and_the_encoder_kept(
    tiny_model: Path, tmp_path: Path
) -> None:
    trained = load(tiny_model, THREE)
    with torch.no_grad():
        trained.bert.pooler.dense.weight.fill_(0.5)
    trained.save_pretrained(tmp_path)
    model = load(tmp_path, FIVE)
    assert model.classifier.weight.shape == (5, 33)
    assert torch.all(model.bert.pooler.dense.weight == 0.5)
    assert torch.equal(model.classifier.weight, load(tmp_path, FIVE).classifier.weight)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_head_of_the_same_classes_gets_the_order_of_the_data(family: str, tmp_path: Path) -> None:
    names: Any = {
        "id2label": dict(enumerate("cab")),
        "label2id": {name: place for place, name in enumerate("cab")},
    }
    trained = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(family, **SIZES, **names)
    ).eval()
    torch.nn.init.normal_([*trained.parameters()][-1])  # the head's bias
    trained.save_pretrained(tmp_path)
    model = load(tmp_path, Labels("single_label_classification", tuple("abc"), ("label",)))
    ids = torch.tensor([[3, 4]])
    torch.testing.assert_close(model.eval()(ids).logits, trained(ids).logits[:, [1, 2, 0]])


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


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_overrides_every_probability(family: str) -> None:
    for probability in (0.0, 0.35):
        config = AutoConfig.for_model(family, **FAMILIES[family])
        set_dropout(config, probability)
        model = AutoModelForSequenceClassification.from_config(config)
        drops = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        drops += [module.drop_prob for module in model.modules() if hasattr(module, "drop_prob")]
        assert drops
        assert set(drops) == {probability}


def test_freeze_unused_changes_nothing_else(tiny_model: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model).eval()
    model.spare = torch.nn.Linear(3, 5)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    freeze_unused(model)
    assert torch.equal(torch.get_rng_state(), state)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"spare.bias", "spare.weight"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_an_unused_pooler_is_frozen_when_loaded(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "big_bird", **SIZES, attention_type="original_full", sep_token_id=3
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    frozen = {
        name for name, parameter in load(tmp_path).named_parameters() if not parameter.requires_grad
    }
    assert frozen == {"bert.pooler.weight", "bert.pooler.bias"}
    fault = fault_of(tmp_path, attn_implementation="flash_attention_2")
    assert (
        "--attn_implementation flash_attention_2: a BigBird has no such attention. It has auto"
        in fault
    )


@pytest.mark.parametrize("name", ["bert-base-chinese", "./no/such/folder", "user/no-such-model"])
def test_a_name_that_cannot_be_found_offline(name: str) -> None:
    fault_of(name, says=[f"model {name}", "cannot be loaded"])


BREAKS: dict[str, Callable[[Path], object]] = {
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "half the weights": lambda folder: os.truncate(folder / "model.safetensors", 9000),
    "an empty file of weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "half a config": lambda folder: (folder / "config.json").write_text('{"model_type"'),
    "an unknown model": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "nosuch"}'
    ),
    # only the head may be new: a new encoder would be random
    "an encoder of another size": lambda folder: edit_json(
        folder / "config.json", intermediate_size=50
    ),
    "more layers than in the config": lambda folder: edit_json(
        folder / "config.json", num_hidden_layers=1
    ),
    "not for texts": lambda folder: (folder / "config.json").write_text('{"model_type": "vit"}'),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_folder_names_the_setting(broken: Path, kind: str) -> None:
    BREAKS[kind](broken)
    assert f"model {broken}" in fault_of(broken)


def test_a_tokenizer_that_cannot_pad_or_is_missing(broken: Path) -> None:
    edit_json(
        broken / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", pad_token=None
    )
    refusal(load_tokenizer, ModelSettings(model_name_or_path=str(broken)), match="no padding token")
    for path in (*broken.glob("tokenizer*"), broken / "vocab.txt"):
        path.unlink()
    refusal(load_tokenizer, ModelSettings(model_name_or_path=str(broken)), match=f"model {broken}")


def test_models_that_need_an_end_or_ignore_padding(tmp_path: Path) -> None:
    """BART reads the state of the last </s>; FNet mixes padding into the text: it takes no attention mask."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
             "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}  # fmt: skip
    for kind, options in {
        "bart": {"d_model": 24, **sizes},
        "fnet": {"hidden_size": 24, "num_hidden_layers": 1},
    }.items():
        config = AutoConfig.for_model(kind, vocab_size=120, **options)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / kind)
    assert load(tmp_path / "bart").config.num_labels == 3
    assert "FNet" in fault_of(tmp_path / "fnet")
