"""Converting a BERT to a BigBird that computes the same; a failure leaves nothing behind."""

import json
import re
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
NONE, CLASSIFIER = "the BERT has no MLM head to keep", "classifier.bias, classifier.weight"
# class -> class of the result, whether it has a pooler, the description of its heads
KINDS: dict[str, tuple[str, bool, str]] = {
    "BertModel": ("BigBirdModel", True, NONE),
    "BertForMaskedLM": ("BigBirdForMaskedLM", False, "MLM head kept"),
    "BertForPreTraining": (
        "BigBirdForMaskedLM", True, "MLM head kept; dropped: cls.seq_relationship.bias, cls.seq_relationship.weight"),
    "BertForNextSentencePrediction": (
        "BigBirdModel", True, f"{NONE}; dropped: cls.seq_relationship.bias, cls.seq_relationship.weight"),
    "BertForSequenceClassification": ("BigBirdModel", True, f"{NONE}; dropped: {CLASSIFIER}"),
    "BertForTokenClassification": (
        "BigBirdModel", False, f"{NONE}; dropped: {CLASSIFIER}"),
}  # fmt: skip
Bert = Callable[..., Path]
SMALL = SparseSizes(max_length=128, block_size=8, num_random_blocks=1)  # sparse above 56 tokens


@pytest.fixture
def bert(tmp_path: Path, tokenizer: Any) -> Bert:
    """`bert("BertForMaskedLM", hidden_act="relu")` -> the folder of a random BERT of 48 positions."""

    def make(kind: str = "BertModel", folder: str = "bert", **changed: Any) -> Path:
        sizes: dict[str, Any] = {
            "vocab_size": len(tokenizer), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 48, "initializer_range": 0.3,
        }  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(11)
            model = getattr(transformers, kind)(BertConfig(**{**sizes, **changed}))
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    torch.nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
        return tmp_path / folder

    return make


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "long"


def convert(source: Path | str, out: Path, **options: int) -> list[str]:
    return to_bigbird(str(source), out, SMALL._replace(**options))


def fault_of(source: Path | str, out: Path, **options: Any) -> str:
    error = refusal(convert, source, out, **options)
    assert not list(out.parent.glob(f".{out.name}*"))  # no drafts
    return error


def batch(length: int = 48) -> dict[str, torch.Tensor]:
    """Two samples with two segments, one of them padded."""
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    segments = (torch.arange(length) > length // 3).long().expand(2, -1)
    return {"input_ids": torch.randint(5, 120, (2, length), generator=generator), "attention_mask": mask,
            "token_type_ids": segments}  # fmt: skip


def outputs_of(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    with torch.inference_mode():
        outputs = model.eval()(**inputs, output_hidden_states=True)
    return outputs.hidden_states[-1][inputs["attention_mask"].bool()], outputs


def same_numbers(
    source: Path | str, out: Path, auto: Any, inputs: dict[str, torch.Tensor]
) -> tuple[Any, Any]:
    """Asserts equal hidden states, and returns all outputs of both."""
    expected, theirs = outputs_of(auto.from_pretrained(source), inputs)
    actual, ours = outputs_of(auto.from_pretrained(out), inputs)
    close(actual, expected)
    return theirs, ours


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_bert(bert: Bert, out: Path, kind: str, tied: bool) -> None:
    family, has_pooler, description = KINDS[kind]
    wrote, heads, next_line = convert(source := bert(kind, tie_word_embeddings=tied), out)
    assert heads == description
    assert f"recipes/bigbird.py --model_name_or_path {out} " in next_line
    assert re.findall(r"\d+", wrote.removeprefix(f"wrote {out}: ")) == ["128", "48", "56"]
    assert json.loads((out / "config.json").read_text())["architectures"] == [family]

    loading = getattr(transformers, family).from_pretrained(out, output_loading_info=True)[1]
    assert all("pooler" in key for key in loading["missing_keys"])
    assert bool(loading["missing_keys"]) != has_pooler
    assert not loading["unexpected_keys"]
    inputs = batch()
    theirs, ours = same_numbers(source, out, AutoModel, inputs)
    if has_pooler:
        close(ours.pooler_output, theirs.pooler_output)
    if family == "BigBirdForMaskedLM":
        theirs, ours = same_numbers(source, out, AutoModelForMaskedLM, inputs)
        visible = inputs["attention_mask"].bool()
        close(ours.logits[visible], theirs.logits[visible])


@pytest.mark.parametrize("kind", [None, "jieba"])
def test_the_tokenizer_is_berts(kind: str | None, bert: Bert, out: Path, tmp_path: Path) -> None:
    """Also on a vocabulary of Chinese words (WoBERT): see toolkit/data/jieba_tokenizer.py."""
    if kind:
        pytest.importorskip(kind)
    theirs = load_tokenizer(ModelSettings(model_name_or_path=str(source := bert()), tokenizer=kind))
    theirs.save_pretrained(source)
    convert(source, out)
    ours = load_tokenizer(ModelSettings(model_name_or_path=str(out)))
    ours.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "config.json").write_bytes((out / "config.json").read_bytes())
    for tokenizer in (
        ours,
        load_tokenizer(ModelSettings(model_name_or_path=str(tmp_path / "again"))),
    ):
        assert type(tokenizer) is type(theirs)
        assert tokenizer(TEXTS).input_ids == theirs(TEXTS).input_ids
        assert tokenizer.all_special_ids == theirs.all_special_ids
        assert tokenizer.model_max_length == 128


@pytest.mark.parametrize(
    ("changed", "sizes", "message"),
    [
        ({"model_type": "roberta"}, {},
         "model_type roberta, and only bert can be converted: use bert-base-chinese"),
        ({"model_type": "big_bird"}, {}, "model_type big_bird"),
        ({"is_decoder": True}, {}, "is a decoder"),
        ({"num_hidden_layers": 1}, {}, "do not match its config.json (encoder.layer.1."),
        ({"num_hidden_layers": 3}, {}, "do not match its config.json (bert.encoder.layer.2."),
        ({"hidden_size": 48}, {}, "do not match its config.json"),
        ({"vocab_size": 200}, {},
         "do not match its config.json (bert.embeddings.word_embeddings.weight "),
        ({}, {"max_length": 40}, "--max_length 40"), ({}, {"max_length": 100}, "use 104"),
        ({}, {"max_length": 56}, "--max_length 56"),
    ],
)  # fmt: skip
def test_unsuitable_models_and_lengths(
    bert: Bert, out: Path, changed: Any, sizes: Any, message: str
) -> None:
    edit_json(bert() / "config.json", **changed)
    assert message in fault_of(out.with_name("bert"), out, **sizes)
    assert not out.exists()


def test_a_source_without_tokenizer_or_weights_or_a_missing_one(
    bert: Bert, out: Path, tmp_path: Path
) -> None:
    source = bert()
    (source / "model.safetensors").unlink()
    for missing in (source, tmp_path / "missing"):
        fault_of(missing, out, match="cannot be loaded")
    source = bert()
    for path in source.glob("tokenizer*"):
        path.unlink()
    fault_of(source, out, match="tokenizer")
    fault_of("demo:minilmm", out, match="did you mean demo:minilm")
    assert not out.exists()


def of(path: Path | str) -> ModelSettings:
    return ModelSettings(model_name_or_path=str(path), dropout=0.2)


def made(settings: ModelSettings) -> Path:
    return Path(str(settings.model_name_or_path))


def test_a_recipes_long_model_is_cached(
    bert: Bert, monkeypatch: pytest.MonkeyPatch, toolkit_cache: Path
) -> None:
    source = bert("BertForMaskedLM")
    settings = long_model(of(source), None)
    path = made(settings)
    assert settings.dropout == 0.2
    assert path.parent == toolkit_cache / "models"
    assert path.name.startswith("bert-bigbird-4096-")
    config = AutoConfig.from_pretrained(path)
    assert (config.max_position_embeddings, config.block_size, config.num_random_blocks) == (
        4096,
        64,
        3,
    )
    assert long_model(settings, 4096) is settings  # a BigBird already
    assert long_model(ModelSettings(), None) == ModelSettings()
    same_numbers(source, path, AutoModel, batch())

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_bigbird", lambda *options: pytest.fail("made again"))
        assert made(long_model(of(source), 30)) == made(long_model(of(source), 4096)) == path
