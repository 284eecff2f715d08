"""`toolkit report RUN --explain`: attributions add up, tokens become words, and the page escapes them."""

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.architectures import SMALL, make_architecture
from tests.faults import refusal
from tests.models.test_bigbird import fast, make
from tests.report.made import classifier, make_run
from tests.report.test_html import NASTY, Page
from toolkit.cli import build_parser
from toolkit.data.jieba_tokenizer import words_first
from toolkit.data.labels import Labels
from toolkit.data.tokens import join_pair
from toolkit.features.explain import page as explain
from toolkit.features.explain.page import Word, attribute
from toolkit.report.html import Sample, read_sample, write_report, write_report_of_folder

pytestmark = pytest.mark.skipif(
    find_spec("captum") is None, reason="the extra `explain` is not installed"
)

TEXTS = [
    "The film was not good, the story dull.",
    f"{NASTY} very good 服务很好",
    "服务很好，房间不好。A fine hotel",
]
AB = Labels("single_label_classification", ("a", "b"), ("label",))
DATA = {"problem_type": AB.problem_type, "labels": AB.names, "max_length": 100}
MISTAKE = Sample(0, 1, "a", "b", True, missed=[("a", 0.1)], added=[("b", 0.9)])


def difference(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, 0] - logits[:, 1]


def assert_adds_up(model: Any, encoded: Any) -> None:
    """The attributions of a text add up to the difference between the outputs for it and for padding."""
    adds = attribute(model, encoded, difference)
    special = encoded.pop("special_tokens_mask").bool()
    padding = torch.where(special, encoded["input_ids"], model.config.pad_token_id)
    output, baseline = (float(difference(model(**{**encoded, "input_ids": ids}).logits))
                        for ids in (encoded["input_ids"], padding))  # fmt: skip
    assert abs(output - baseline) > 0.01
    assert adds.sum() == pytest.approx(output - baseline, rel=2e-2, abs=2e-3)
    assert not adds[special[0]].any()
    assert not model.get_input_embeddings()._forward_hooks


def test_attributions_add_up_to_the_difference_of_the_outputs(
    sharp_model: Path, tmp_path: Path
) -> None:
    folder = classifier(sharp_model, tmp_path / "m", AB)
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    model.eval().requires_grad_(False)
    for text in TEXTS:
        assert_adds_up(model, tokenizer(text, return_tensors="pt", return_special_tokens_mask=True))


def test_a_bigbird() -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "max_position_embeddings": 1024,
        "block_size": 16,
        "num_random_blocks": 2,
    }
    model = fast(make(training=False, sharpness=1, **sizes)).requires_grad_(False)
    model.classifier.out_proj.weight *= 5000
    ids, special = torch.randint(5, 50, (1, 1000)), torch.zeros(1, 1000, dtype=torch.long)
    special[0, [0, -1]] = 1
    encoded = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "special_tokens_mask": special,
    }
    assert_adds_up(model, encoded)


def test_pieces_of_words_are_joined_and_chinese_characters_are_not(tokenizer: Any) -> None:
    text = "unpaid 房间 <b>"
    encoded = tokenizer(text, return_offsets_mapping=True)
    tokens = [(*span, word, 1.0) for span, word in zip(encoded["offset_mapping"], encoded.word_ids(), strict=True)
              if word is not None]  # fmt: skip
    words = explain.join_tokens(text, tokens)
    assert "".join(word.text for word in words) == f"{text} "
    assert [word.text for word in words if word.attribution] == [
        "unpaid",
        "房",
        "间",
        "<",
        "b",
        ">",
    ]
    assert (
        next(word.attribution for word in words if word.text == "unpaid") == 6.0
    )  # the sum of its pieces
    # a tokenizer that takes a Chinese sentence for one word, and one whose tokens are bytes of characters
    words = explain.join_tokens(
        "a 很好", [(0, 1, 0, 1.0), (2, 3, 1, 2.0), (2, 3, 1, 3.0), (3, 4, 1, 4.0)]
    )
    assert [word for word in words if word.attribution] == [
        Word("a", 1.0),
        Word("很", 5.0),
        Word("好", 4.0),
    ]


@pytest.mark.parametrize(
    "name", ["BERT", "RoBERTa", "XLM-R", "ModernBERT", "DeBERTa-v3", "ALBERT", "Qwen3"]
)
def test_the_words_of_every_kind_of_tokenizer_are_the_text(name: str, tmp_path: Path) -> None:
    text = "The café is fine, 服务很好 unbelievably. 😀"
    make_architecture(name, tmp_path / "base", ["The café is fine and unbelievably good."] * 3)
    names: Any = {
        "id2label": {0: "a", 1: "b"},
        "label2id": {"a": 0, "b": 1},
        "problem_type": AB.problem_type,
    }
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", **names)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "model")
    explanation = explain.explain(tmp_path, DATA, [MISTAKE], [text])[0]
    assert "".join(word.text for word in explanation["words"]).rstrip() == text
    words = [word.text for word in explanation["words"] if word.attribution]
    if name not in ("XLM-R", "DeBERTa-v3", "ALBERT"):  # for which unknown characters are one token
        assert {"服", "务", "很", "好"} <= set(words)
    assert "unbelievably" in " ".join(words)


def test_words_of_a_jieba_tokenizer(sharp_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    tokenizer = words_first(AutoTokenizer.from_pretrained(sharp_model))
    tokenizer.save_pretrained(classifier(sharp_model, tmp_path / "model", AB))
    explanation = explain.explain(tmp_path, DATA, [MISTAKE], [TEXTS[2]])[0]
    assert "".join(word.text for word in explanation["words"]) == f"{TEXTS[2]} "
    assert explanation["difference"]


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    "kind", ["single_label_classification", "multi_label_classification", "regression"]
)
def test_the_page_shows_attributions(kind: Any, sharp_model: Path, tmp_path: Path) -> None:
    names = ("price",) if kind == "regression" else ("neg", "pos")
    labels, probabilities = Labels(kind, names, ("label",)), {"probabilities": [0.1, 0.9]}
    line, towards, against = {
        "single_label_classification": (
            {"label": "neg", "prediction": "pos", **probabilities},
            "pos",
            "neg",
        ),
        "multi_label_classification": (
            {"label": [], "prediction": ["pos"], **probabilities},
            "pos",
            "not pos",
        ),
        "regression": ({"label": 1.0, "prediction": 3.0}, "a greater price", "a smaller one"),
    }[kind]
    predictions = [{"id": place, **line} for place in range(3)]
    metrics = ("pearson", "mae") if kind == "regression" else ("accuracy", "f1_macro", "f1_micro")
    last = make_run(tmp_path / "run", labels, predictions, dict.fromkeys(("loss", *metrics), 0.5))
    classifier(sharp_model, tmp_path / "run" / "model", labels)
    write_report(tmp_path / "run", last, TEXTS, Namespace(explain=2))
    page = Page(tmp_path / "run" / "report.html")
    assert page.loads() == []
    cells = [row[1] for row in page.rows["mistakes"][1:]]
    assert sum("; sum" in cell for cell in cells) == 2, cells
    assert f"towards{towards}+,towards{against}−".replace(" ", "") in cells[0].replace(" ", "")
    assert "".join(cells[1].split()).startswith("".join(NASTY.split()))
    assert "服务很好" in "".join(cells[1].split())
    assert "<script" not in page.source
    assert [tag for tag, attributes in page.tags if tag == "i" and attributes.get("title")]


@pytest.mark.parametrize("types", [1, 2])
def test_the_texts_of_a_pair_have_line_breaks(
    types: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a model of one token type, whose tokenizer makes two."""
    run, line = (
        tmp_path / "run",
        {"id": 0, "label": "a", "prediction": "b", "probabilities": [0.1, 0.9]},
    )
    monkeypatch.setitem(SMALL, "type_vocab_size", types)
    make_architecture("BERT", tmp_path / "base", ["one two three four"] * 3)
    classifier(tmp_path / "base", run / "model", AB)
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    AutoTokenizer.from_pretrained(run / "model", model_input_names=inputs).save_pretrained(
        run / "model"
    )
    data, texts = (
        DATA | {"text_pair": "other", "max_length": 20},
        [join_pair("one\ntwo", "three\nfour")],
    )
    explanation = explain.explain(run, data, [read_sample(0, line, AB)], texts)[0]
    assert "".join(word.text for word in explanation["words"]).split() == [
        "one",
        "two",
        "three",
        "four",
    ]


def test_texts_are_truncated_as_in_training(sharp_model: Path, tmp_path: Path) -> None:
    run, line = (
        tmp_path / "run",
        {"id": 0, "label": "a", "prediction": "b", "probabilities": [0.1, 0.9]},
    )
    make_run(run, AB, [line], {"loss": 0.5, "accuracy": 0.1, "f1_macro": 0.1})
    classifier(sharp_model, run / "model", AB)
    explanation = explain.explain(
        run, DATA | {"max_length": 20}, [read_sample(0, line, AB)], ["good film " * 50]
    )[0]
    assert [word.text for word in explanation["words"] if word.attribution] == ["good", "film"] * 9
    assert explanation["difference"] == sum(word.attribution for word in explanation["words"]) != 0
    refusal(
        write_report_of_folder,
        run,
        Namespace(explain=5),
        match="needs the texts of the last evaluation",
    )
    assert build_parser().parse_args(["report", "x", "--explain", "5"]).explain == 5
    refusal(build_parser().parse_args, ["report", "x", "--explain=-1"], says=["--explain", "-1"])
