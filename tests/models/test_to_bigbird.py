"""Converting a BERT to a BigBird that computes the same; a failure leaves nothing behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, BertConfig

from tests.faults import refusal
from tests.runs import edit_json
from toolkit.config import ModelSettings
from toolkit.data.tokenizer import load_tokenizer
from toolkit.models import to_bigbird as module
from toolkit.models.to_bigbird import SparseSizes, long_model, to_bigbird

TEXTS = ["今天很好，书店不差。", "The ROOM was not bad, very fine!", "買賣 [MASK] 2 films"]
KINDS: dict[str, tuple[str, bool, str]] = {
    "BertModel": ("BigBirdModel", True, ""),
    "BertForMaskedLM": ("BigBirdForMaskedLM", False, ""),
    "BertForPreTraining": ("BigBirdForMaskedLM", True, "cls.seq_relationship"),
    "BertForTokenClassification": ("BigBirdModel", False, "classifier"),
}
Bert = Callable[..., Path]
SMALL = SparseSizes(max_length=128, block_size=8, num_random_blocks=1)  # sparse above 56 tokens
SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 48, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture
def bert(tmp_path: Path, tokenizer: Any) -> Bert:
    """`bert("BertForMaskedLM")` -> the folder of a random BERT of 48 positions."""

    def make(kind: str = "BertModel", tied: bool = True) -> Path:
        config = BertConfig(**SIZES, vocab_size=len(tokenizer), tie_word_embeddings=tied)
        with torch.random.fork_rng():
            torch.manual_seed(11)
            model = getattr(transformers, kind)(config)
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    torch.nn.init.normal_(parameter)
        for each in (model, tokenizer):
            each.save_pretrained(tmp_path / "bert")
        return tmp_path / "bert"

    return make


def assert_same_numbers(source: Path, out: Path, auto: Any, has_pooler: bool = False) -> None:
    """The last hidden states, and what the model makes of them, for two samples with two segments; one is padded."""
    generator = torch.Generator().manual_seed(48)
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[1, 24:] = 0
    types = (torch.arange(48) > 16).long().expand(2, -1)
    ids = torch.randint(5, 120, (2, 48), generator=generator)
    outputs = []
    for folder in (source, out):
        with torch.inference_mode():
            model = auto.from_pretrained(folder).eval()
            output = model(ids, mask, types, output_hidden_states=True)
        visible = [each[mask.bool()] for each in (output.hidden_states[-1], output[0])]
        pooled = [output.pooler_output] if has_pooler else []
        outputs.append([*visible, *pooled])
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "long"


def convert(source: Path | str, out: Path, **options: int) -> list[str]:
    return to_bigbird(str(source), out, SMALL._replace(**options))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_bert(bert: Bert, out: Path, kind: str, tied: bool) -> None:
    family, has_pooler, dropped = KINDS[kind]
    source = bert(kind, tied)
    _, heads, _ = convert(source, out)
    assert ("MLM head kept" in heads) == (family == "BigBirdForMaskedLM")
    assert heads.partition("dropped: ")[2].count(f"{dropped}.") == (2 if dropped else 0)
    assert json.loads((out / "config.json").read_text())["architectures"] == [family]
    loading = getattr(transformers, family).from_pretrained(out, output_loading_info=True)[1]
    assert all("pooler" in key for key in loading["missing_keys"])
    assert bool(loading["missing_keys"]) != has_pooler
    assert not loading["unexpected_keys"]
    assert_same_numbers(source, out, AutoModel, has_pooler)
    if family == "BigBirdForMaskedLM":
        assert_same_numbers(source, out, AutoModelForMaskedLM)


@pytest.mark.parametrize("kind", [None, "jieba"])
def test_the_tokenizer_is_berts(kind: str | None, bert: Bert, out: Path) -> None:
    """Also on a vocabulary of Chinese words (WoBERT): see toolkit/data/jieba_tokenizer.py."""
    if kind:
        pytest.importorskip(kind)
    source = bert()
    theirs = load_tokenizer(ModelSettings(model_name_or_path=str(source), tokenizer=kind))
    theirs.save_pretrained(source)
    convert(source, out)
    for _ in range(2):  # it is saved again with what is trained on it
        tokenizer = load_tokenizer(ModelSettings(model_name_or_path=str(out)))
        assert type(tokenizer) is type(theirs)
        assert tokenizer(TEXTS).input_ids == theirs(TEXTS).input_ids
        assert tokenizer.all_special_ids == theirs.all_special_ids
        assert tokenizer.model_max_length == 128
        tokenizer.save_pretrained(out)


def test_unsuitable_sources_and_lengths(bert: Bert, out: Path) -> None:
    def assert_refused(source: Path | str, *says: str, **options: int) -> None:
        refusal(convert, source, out, says=says, **options)
        assert not list(out.parent.glob(f"*{out.name}*"))  # no drafts

    for message, changed in {
        "model_type roberta, and only bert can be converted": {"model_type": "roberta"},
        "is a decoder": {"is_decoder": True},
        "do not match its config.json (encoder.layer.1.": {"num_hidden_layers": 1},
    }.items():
        source = bert()
        edit_json(source / "config.json", **changed)
        assert_refused(source, message)
    source = bert()
    for length, says in ((40, "--max_length 40"), (100, "use 104"), (56, "--max_length 56")):
        assert_refused(source, says, max_length=length)
    for files, says in (("tokenizer*", "tokenizer"), ("model.safetensors", "cannot be loaded")):
        for path in bert().glob(files):
            path.unlink()
        assert_refused(source, says)
    assert_refused("demo:minilmm", "choose demo:minilm")


def test_a_recipes_long_model_is_cached(bert: Bert, monkeypatch: Any, toolkit_cache: Path) -> None:
    source = bert("BertForMaskedLM")
    short = ModelSettings(model_name_or_path=str(source), dropout=0.2)
    settings = long_model(short, None)
    path = Path(str(settings.model_name_or_path))
    assert settings.dropout == 0.2
    assert path.parent == toolkit_cache / "models"
    config = AutoConfig.from_pretrained(path)
    sizes = (config.max_position_embeddings, config.block_size, config.num_random_blocks)
    assert sizes == (4096, 64, 3)
    assert long_model(settings, 4096) is settings  # a BigBird already
    assert long_model(ModelSettings(), None) == ModelSettings()
    assert_same_numbers(source, path, AutoModel)
    monkeypatch.setattr(module, "_write_bigbird", lambda *options: pytest.fail("made again"))
    assert long_model(short, 30) == long_model(short, 4096) == settings
