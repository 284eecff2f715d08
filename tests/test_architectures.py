"""Architectures that people use, each with recipes/cls.py; docs/models.md says what was measured."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

import toolkit
from tests import inputs
from tests.architectures import ARCHITECTURES, make_architecture
from tests.faults import refusal
from tests.matrix import runs
from tests.runs import edit_json, lines_of, losses_of, slow_but
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.data.tokenizer import load_tokenizer
from toolkit.evaluation.self_test import check_folder
from toolkit.models.classifier import load_classifier, load_saved_classifier

FEW = ("ALBERT", "GTE", "Qwen3, LoRA")  # in the tests that are not slow
# each way resumes the checkpoints of another
SOURCES = {"fsdp2 x2": "single", "ddp x2": "fsdp2 x2", "zero2 x2": "ddp x2", "zero3 x2": "zero2 x2"}
TEXTS = ("a fine film", "the story, dull as it is, goes on and on")


def rows() -> Path:
    def make(folder: Path) -> None:
        table = pandas.read_csv(inputs.reviews()).head(60)
        table["text"] = table["text"].str[:60]
        table["other"] = table["text"].iloc[::-1].tolist()
        table[["text", "other", "label"]].to_csv(folder / "rows.csv", index=False)

    return inputs.shared("short pairs", make) / "rows.csv"


def model_of(name: str) -> Path:
    texts = list(pandas.read_csv(rows())["text"])
    return inputs.shared(name, lambda folder: make_architecture(name, folder, texts))


COMMON = ["--train_file", rows, "--text_column", "text", "--label_column", "label", "--text_pair", "other", "--dropout",
          0, "--report_to", "none", "--global_batch_size", 10, "--per_device_batch_size", 3, "--max_steps", 4,
          "--eval_every", 2, "--checkpoint_every", 2, "--keep_checkpoints", 9, "--learning_rate", "1e-3"]  # fmt: skip


def run(way: str, name: str, precision: str = "no", source: str = "") -> Path:
    """A whole run, or one that resumes after step 2 of the way `source`, with gradient checkpointing."""
    words = ["--model_name_or_path", model_of(name), *COMMON, *ARCHITECTURES[name].settings]
    words += ["--mixed_precision", precision]
    if source:
        words += ["--resume", run(source, name) / "checkpoints" / "step-00000002"]
    if source and name != "ALBERT":  # which does not support it
        words += ["--gradient_checkpointing"]
    return runs(way).run(f"{name} {precision} {source}".strip(), "recipes.cls", words)


def assert_converts(run: Path, out: Path) -> None:
    """The best checkpoint converts to the tensors of model/, which are those that transformers expects."""
    lora = (run / "adapter").exists()
    settings = json.loads((run / "config.json").read_text())["settings"]
    base = Path(settings["model_name_or_path"]) if lora else None
    toolkit.convert(run / "checkpoints" / "best", out, base_model=base)
    assert check_folder(str(out))
    expected = load_file(run / "model" / "model.safetensors")
    converted = load_file(out / "model.safetensors")
    assert set(converted) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(converted[name], tensor, rtol=0, atol=1e-6 if lora else 0)
    for folder in (out, run / "model"):
        kind = AutoModelForSequenceClassification
        loading = kind.from_pretrained(folder, output_loading_info=True)[1]
        assert not any(loading.values()), loading


def assert_predicts(run: Path, file: Path) -> None:
    table = pandas.read_csv(file)
    pairs = list(zip(table["text"], table["other"], strict=True))
    answers = toolkit.predict(run / "model", pairs, mixed_precision="no")
    for line in lines_of(run / "predictions.jsonl"):
        answer = answers[line["id"]]["probabilities"]
        assert answer == pytest.approx(line["probabilities"], abs=1e-5)


@pytest.mark.parametrize("name", slow_but(ARCHITECTURES, *FEW))
def test_one_process(name: str, tmp_path: Path) -> None:
    one = run("single", name)
    losses = losses_of(one)
    assert max(losses) - min(losses) > 0.001  # equal ones would agree with anything
    assert losses_of(run("single", name, "bf16")) == pytest.approx(losses, rel=0.03)
    assert_converts(one, tmp_path / "out")
    assert_predicts(one, rows())


@pytest.mark.parametrize(
    "case",
    slow_but(product(SOURCES, ARCHITECTURES), *(("fsdp2 x2", name) for name in FEW)),
    ids=", ".join,
)
def test_the_same_as_in_one_process(case: tuple[str, str], tmp_path: Path) -> None:
    way, name = case
    one = run("single", name)
    assert_converts(run(way, name), tmp_path / "out")
    for many, after in ((run(way, name), 0), (run(way, name, source=SOURCES[way]), 2)):
        assert losses_of(many) == pytest.approx(losses_of(one)[after:], rel=1e-5)
        lines = [lines_of(each / "predictions.jsonl") for each in (many, one)]
        for mine, theirs in zip(*lines, strict=True):
            assert mine["id"] == theirs["id"]
            assert mine["probabilities"] == pytest.approx(theirs["probabilities"], abs=1e-4)


def _loaded(folder: Path, **settings: Any) -> tuple[Any, Any]:
    model_settings = ModelSettings(model_name_or_path=str(folder), **settings)
    labels = Labels("single_label_classification", ("neg", "pos"), ("label",))
    return load_classifier(model_settings, labels, seed=1), load_tokenizer(model_settings)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "LoRA" not in name])
def test_hidden_states_and_attentions_are_those_of_transformers(name: str) -> None:
    folder = model_of(name)
    has_weights = name != "BigBird"
    mine = _loaded(folder, attn_implementation="eager" if has_weights else None)[0].eval()
    kind = AutoModelForSequenceClassification
    theirs: Any = kind.from_pretrained(folder, attn_implementation="eager").eval()
    theirs.config.pad_token_id = mine.config.pad_token_id
    theirs.load_state_dict(mine.state_dict())
    ids = torch.arange(2 * 61).view(2, 61) % 15 + 5
    mask = (torch.arange(61) < torch.tensor([[61], [40]])).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    if not has_weights:
        refusal(mine, **batch, output_attentions=True, match="computes no attention weights")
    for key in ["hidden_states", "attentions"][: 1 + has_weights]:
        outputs, expected = (model(**batch, **{f"output_{key}": True}) for model in (mine, theirs))
        assert len(outputs[key]) == len(expected[key]) > 0
        # their BigBird's are padded to blocks
        values = tuple(each[:, : ids.shape[1]] for each in expected[key])
        torch.testing.assert_close(outputs[key], values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)
    # the input of a custom head
    states = [model.base_model(**batch).last_hidden_state for model in (mine, theirs)]
    assert states[0].shape[:2] == ids.shape
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    folder = shutil.copytree(model_of("GTE"), tmp_path / "new")
    classes = {"AutoConfig": "a.C", "AutoModelForSequenceClassification": "b.M"}
    edit_json(folder / "config.json", model_type="new", auto_map=classes)
    refusal(_loaded, folder, match="needs its own Python code, which is not executed")


def test_a_decoder_pads_with_its_tokenizers_token(tmp_path: Path) -> None:
    """Its head reads the last token before padding."""
    model, tokenizer = _loaded(model_of("Qwen3"))
    assert AutoConfig.from_pretrained(model_of("Qwen3")).pad_token_id is None
    assert model.config.pad_token_id == tokenizer.pad_token_id
    both = tokenizer([*TEXTS], return_tensors="pt", padding=True)
    alone = [tokenizer([text], return_tensors="pt") for text in TEXTS]
    with torch.no_grad():
        together = model.eval()(**both).logits
        apart = torch.cat([model(**each).logits for each in alone])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    # a model saved by another tool may lack it, or name another
    tokenizer.save_pretrained(tmp_path)
    settings = ModelSettings(model_name_or_path=str(tmp_path))
    for other in (None, 5):
        model.config.pad_token_id = other
        model.save_pretrained(tmp_path)
        for loaded in (load_saved_classifier(settings), _loaded(tmp_path)[0]):
            assert loaded.config.pad_token_id == tokenizer.pad_token_id != 5
