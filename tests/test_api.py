"""docs/api.md: the names that `import toolkit` offers, and the examples, in one process and by notebook_launcher."""

import json
import re
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import datasets
import pandas as pd
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import toolkit
from tests.faults import refusal
from tests.report.made import classifier, save_columns
from tests.runs import ROOT, free_port, lines_of, losses_of, recipe
from toolkit.data.labels import Labels

MORE = """dropout=0.0, mixed_precision="no", report_to="none", global_batch_size=12, per_device_batch_size=6,
    checkpoint_every=3, max_steps=6"""
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ON_A_MODEL, TRAIN, IN_ONE_PROCESS, IN_A_NOTEBOOK = PROGRAMS


def test_all_names_exist() -> None:
    """And `import toolkit` is light: tests/test_structure.py."""
    assert all(callable(getattr(toolkit, name)) for name in dir(toolkit))
    with pytest.raises(AttributeError, match="evaluat"):
        _ = toolkit.evaluat


@pytest.fixture(scope="module")
def runs(tiny_model: Path, reviews: Path, tmp_path_factory: Any) -> Path:
    """A folder with the runs of the page's two calls of `train`."""
    folder = tmp_path_factory.mktemp("api")
    for name, call in (("plain", IN_ONE_PROCESS), ("notebook", IN_A_NOTEBOOK)):
        for before, after in {
            "bert-base-chinese": str(tiny_model),
            "reviews.csv": str(reviews),
            ", num_train_epochs=2": "",
            '"runs/mine"': f'"{folder / name}", {MORE}',
            "num_processes=2)": f'num_processes=2, use_port="{free_port()}")',
        }.items():
            call = call.replace(before, after)
        script = folder / f"{name}.py"
        script.write_text(f'{TRAIN}\n\nif __name__ == "__main__":\n{indent(call, "    ")}')
        assert "Traceback" not in recipe(script=str(script), pages=True).succeeded().err
    return folder


def test_a_notebook_trains_as_a_script_does(runs: Path) -> None:
    for name, processes in {"plain": 1, "notebook": 2}.items():
        world = json.loads((runs / name / "config.json").read_text())["world"]
        assert world["num_processes"] == processes
    losses = losses_of(runs / "plain")
    assert len(losses) == 6
    assert losses_of(runs / "notebook") == pytest.approx(losses, rel=1e-5)
    assert (runs / "notebook" / "report.html").is_file()


def test_predict_evaluate_convert(
    runs: Path, reviews: Path, tmp_path: Path, no_launcher: None, capsys: Any
) -> None:
    run = runs / "plain"
    code = ON_A_MODEL.replace("MODEL", f"{run}/model").replace("OUT", f"{tmp_path}/out")
    exec(code.replace("CHECKPOINT", f"{run}/checkpoints/best"), {})
    answer = r"\{'prediction': '(neg|pos)', 'probabilities': \[0\.\d+, 0\.\d+\]\}"
    assert re.match(rf"\[{answer}, ", capsys.readouterr().out)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    rows, lines = pd.read_csv(reviews), lines_of(run / "predictions.jsonl")
    texts, labels = ([rows[name][line["id"]] for line in lines] for name in ("text", "label"))
    answers = toolkit.predict(run / "model", texts, per_device_batch_size=7)
    assert [each["prediction"] for each in answers] == [line["prediction"] for line in lines]
    metrics = toolkit.evaluate(run / "model", texts, labels)
    assert metrics.items() <= lines_of(run / "eval.jsonl")[-1].items()
    assert {"accuracy", "f1_macro", "per_class"} <= set(metrics)
    refuse = partial(refusal, toolkit.evaluate, run / "model")
    refuse(texts[:2], ["pos"], match="2 texts and 1 labels")
    refuse([], [], match="0 texts and 0 labels")
    message = "texts, row 1: label 'good' does not occur in training: the classes are neg, pos"
    refuse(texts[:1], ["good"], match=message)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any, sharp_model: Path) -> Path:
    labels = Labels("single_label_classification", ("a", "b", "c"), ("label",))
    return classifier(sharp_model, tmp_path_factory.mktemp("run") / "model", labels)


def test_a_model_without_a_layer(model: Path, tmp_path: Path, no_launcher: None) -> None:
    """As saved by a recipe that removes layers; transformers would initialize them randomly."""
    cut = AutoModelForSequenceClassification.from_pretrained(model)
    del cut.base_model.encoder.layer[-1]
    cut.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    refusal(toolkit.predict, tmp_path / "model", ["good"], says=["config.json", "encoder.layer.1."])


def test_anything_but_texts_is_refused(model: Path, tiny_model: Path, no_launcher: None) -> None:
    """Not the characters of a string, the names of columns, or "None"."""
    refusal(toolkit.predict, tiny_model, ["good"], match="no trained classification head")
    frame = pd.DataFrame({"text": ["good"], "label": ["a"]})
    for one in ("good", None, frame, {"text": ["good"]}):
        refusal(toolkit.predict, model, one, says=[f"type {type(one).__name__}", "a list of str"])
    nan, rows = pd.Series(["good", float("nan")]), datasets.Dataset.from_pandas(frame)
    for texts, row in ((["good", None], 2), ([("good", None)], 1), ([3.5], 1), (nan, 2), (rows, 1)):
        refusal(toolkit.predict, model, texts, says=[f"texts, row {row}: ", "a list of str"])
    save_columns(model, text_pair="reply")
    refusal(toolkit.predict, model, ["good"], says=["reply", "(str, str)"])
    assert len(toolkit.predict(model, [("good", "bad")])) == 1
    save_columns(model)
