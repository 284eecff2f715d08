"""The model card says what the run did: the front matter for the hub, and the facts in the text."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from tests.models.test_classifier import classifier_of
from tests.report.made import TITLES, add_comparison, make_run
from tests.runs import edit_json
from toolkit.config import PretrainedSettings, TaskSettings, build, flat
from toolkit.data.labels import Labels
from toolkit.data.tokenizer import load_tokenizer
from toolkit.evaluation.self_test import write_self_test
from toolkit.features.titles.model import load_title_model
from toolkit.features.titles.settings import GenerationSettings, TitleSettings
from toolkit.report.card import write_card
from toolkit.report.model_class import architecture

NAMES = ("负面", "正面|x", "<b>_odd_</b>")
SCORES = {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": 12}
SINGLE: dict[str, Any] = {"num_samples": 453, "loss": 0.6, "accuracy": 0.75, "f1_macro": 0.7}
SINGLE["per_class"] = dict.fromkeys(NAMES, SCORES)
LABELS = Labels("single_label_classification", NAMES, ("label",))
DEMO = {"model_name_or_path": "demo:minilm", "dataset_name": "demo:rotten-tomatoes"}
NEWS = {"model_name_or_path": "demo:minilm", "dataset_name": "demo:bbc"}


def card(
    folder: Path, settings: dict[str, Any], numbers: dict[str, Any] = SINGLE, labels: Labels = LABELS,
    **data: Any,
) -> ModelCard:  # fmt: skip
    """Writes a card for a run of these settings and loads it as the hub does."""
    folder.mkdir(exist_ok=True)
    run = folder / "run"
    make_run(run, labels, [], numbers, flat(build(TaskSettings, settings)), **data)
    add_comparison(run, accuracy=0.5, f1_macro=0.25)  # on truncated texts
    classifier_of("bert").save_pretrained(run / "model")
    write_card(run / "model", run)
    return ModelCard.load(run / "model" / "README.md")


def test_front_matter_and_facts(tmp_path: Path) -> None:
    written = card(tmp_path, DEMO | {"learning_rate": 1e-4, "warmup_ratio": 0.1})
    data = written.data
    assert data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-classification")
    assert (data.license, data.datasets) == (None, None)
    assert data.metrics == ["loss", "accuracy", "f1_macro"]
    for row in ("| 1 | 正面\\|x |", "| 正面\\|x | 0.5000 | 0.2500 | 0.3333 | 12 |",
                "&lt;b&gt;\\_odd\\_&lt;/b&gt;", "| accuracy | 0.7500 |", "| learning_rate | 0.0001 |",
                "| warmup_ratio | 0.1 |", "| optimizer steps | 40 of 40 |",
                "| train | 7,677 |", "| mixed_precision | bf16 |", "- torch 2.13.0", "step 40"):  # fmt: skip
        assert row in written.text
    assert "<b>" not in written.text


def test_names_of_the_hub_and_no_local_path(tmp_path: Path, monkeypatch: Any) -> None:
    """Also in the card of a run's best model, when it was stopped."""
    hub = {"model_name_or_path": "bert-base-chinese", "dataset_name": "some/reviews"}
    data = card(tmp_path / "hub", hub).data
    assert (data.base_model, data.datasets) == ("bert-base-chinese", ["some/reviews"])
    home = tmp_path / "secret"
    monkeypatch.setenv("HOME", str(home))
    settings = {"model_name_or_path": f"{home}/my-bert", "train_file": f"{home}/train.csv"}
    loaded = card(tmp_path, settings, notes=[f"{home}/train.csv: 9 of 90 rows are held out"])
    assert loaded.data.base_model is None
    assert "`my-bert`" in loaded.text
    run = tmp_path / "run"
    edit_json(run / "config.json", stopped={"signal": "SIGINT", "step": 27, "command": f"{home}/a"})
    write_card(run / "model", run, 30)
    stopped = (run / "model" / "README.md").read_text()
    for shown in ("SIGINT after step 27 of 40", "step 30", "| accuracy | 0.1000 |"):
        assert shown in stopped
    for text in (loaded.content, stopped):
        assert "secret" not in text
        assert str(tmp_path) not in text


MULTI = Labels("multi_label_classification", NAMES, ("labels",))
SCORE = Labels("regression", ("score",), ("score",))
ERRORS = {"num_samples": 453, "loss": 0.2, "mse": 0.2, "mae": 0.3, "pearson": None}
PAIR = {"text_column": "text", "text_pair": "reply"}


def snippets_of(loaded: ModelCard) -> list[str]:
    """How to use the model; and, if it has a self test, the script that compares."""
    return re.findall(r"```python\n(.*?)```", loaded.text, re.DOTALL)


@pytest.mark.parametrize(
    ("labels", "numbers", "kind", "pair"),
    [(LABELS, SINGLE, "jieba", {}), (SCORE, ERRORS, None, PAIR), (MULTI, SINGLE, None, {})],
)
def test_the_snippet(tmp_path: Path, labels: Labels, numbers: Any, kind: Any, pair: Any) -> None:
    loaded = card(tmp_path, DEMO | {"tokenizer": kind}, numbers, labels, **pair)
    (snippet,) = snippets_of(loaded)
    ast.parse(snippet)
    for part, expected in (
        ("truncation=True, max_length=128", True),
        ("words_first(AutoTokenizer.from_pretrained(model))", kind == "jieba"),
        ("top_k=None", labels is MULTI),
        ('classify({"text": "Put a text here.", "text_pair": ', bool(pair)),
    ):
        assert (part in snippet) == expected, part
    assert ("| pearson | – |" in loaded.text) == (labels is SCORE)


@pytest.mark.parametrize("kind", [None, "jieba"])
def test_snippet_of_titles(tmp_path: Path, tiny_model: Path, kind: Any, monkeypatch: Any) -> None:
    tiny = PretrainedSettings(model_name_or_path=str(tiny_model), tokenizer=kind)
    tokenizer = load_tokenizer(tiny)
    model: Any = load_title_model(tiny, tiny, GenerationSettings(num_beams=2), tokenizer, 9, seed=1)
    run = tmp_path / "run"
    settings = flat(build(TitleSettings, NEWS | {"tokenizer": kind, "num_beams": 3}))
    make_run(run, None, [], TITLES | {"num_samples": 50}, settings)
    model.save_pretrained(run / "model")
    tokenizer.save_pretrained(run / "model")
    write_self_test(run / "model")
    write_card(run / "model", run)
    loaded = ModelCard.load(run / "model" / "README.md")
    assert loaded.data.pipeline_tag == "summarization"
    for row in ("`EncoderDecoderModel`", "| rouge1 | 0.4100 |", "| num_beams | 3 |"):
        assert row in loaded.text
    snippet, script = snippets_of(loaded)
    long = snippet.replace("Put a text here.", "很好的电影 " * 200)
    monkeypatch.chdir(run / "model")
    names: dict[str, Any] = {}
    exec(long, names)
    assert names["inputs"]["input_ids"].shape == (1, 128)
    backend = "WordBackend" if kind else "Tokenizer"
    assert type(names["tokenizer"].backend_tokenizer).__name__ == backend
    exec(script, {})


def test_the_script_of_the_self_test(tmp_path: Path, tiny_model: Path, monkeypatch: Any) -> None:
    """It needs transformers alone, and fails for another model and for another tokenizer."""
    card(tmp_path, DEMO)
    folder = tmp_path / "run" / "model"
    sizes = {
        "vocab_size": 127,
        "max_position_embeddings": 131,
        "hidden_size": 12,
        "num_attention_heads": 2,
    }
    model = classifier_of("bert", sizes, num_labels=3)
    model.save_pretrained(folder)
    load_tokenizer(PretrainedSettings(model_name_or_path=str(tiny_model))).save_pretrained(folder)
    write_self_test(folder)
    write_card(folder, tmp_path / "run")
    _, script = snippets_of(ModelCard.load(folder / "README.md"))
    assert "toolkit" not in script
    monkeypatch.chdir(folder)
    exec(script, {})
    model.classifier.bias.data += 0.01
    model.save_pretrained(folder)
    with pytest.raises(AssertionError, match="not close"):
        exec(script, {})
    AutoTokenizer.from_pretrained(folder, do_lower_case=False).save_pretrained(folder)
    with pytest.raises(AssertionError, match="other tokens"):
        exec(script, {})


def test_a_classifier_with_another_head_is_not_of_transformers(tmp_path: Path) -> None:
    model = classifier_of("bert")
    model.loss = torch.nn.Linear(2, 2)  # from_pretrained skips it
    model.save_pretrained(tmp_path)
    assert architecture(tmp_path) == "BertForSequenceClassification"
    model.classifier = torch.nn.Sequential(model.classifier)
    model.save_pretrained(tmp_path)
    assert architecture(tmp_path) == ""
    edit_json(tmp_path / "config.json", architectures=["Mine"])
    assert architecture(tmp_path) == ""
