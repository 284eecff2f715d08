"""docs/api.md: the names that `import toolkit` offers, and the examples, in one process and by notebook_launcher."""

import json
import re
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import toolkit
from tests.evaluation.columns import save_columns
from tests.faults import refusal
from tests.report.made import classifier
from tests.runs import ROOT, free_port, lines_of, losses_of, recipe, start
from toolkit.data.labels import Labels

MORE = (
    'dropout=0.0, mixed_precision="no", report_to="none", global_batch_size=12, per_device_batch_size=6, '
    "checkpoint_every=3, max_steps=6"
)


def examples() -> list[str]:
    return re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.DOTALL
    )


def test_all_names_exist_and_import_toolkit_is_light() -> None:
    heavy = "{'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)"
    code = f"import sys, toolkit; assert 'Run' in dir(toolkit); sys.exit(' '.join({heavy}) or 0)"
    done = start([sys.executable, "-c", code])
    assert (done.code, done.err) == (0, "")
    assert all(callable(getattr(toolkit, name)) for name in dir(toolkit))
    with pytest.raises(AttributeError, match="has no attribute 'evaluat'"):
        _ = toolkit.evaluat


@pytest.fixture(scope="module")
def runs(tiny_model: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of the page's two calls of `train`."""
    folder = tmp_path_factory.mktemp("api")
    _, train, plain, notebook = examples()
    for name, call in (("plain", plain), ("notebook", notebook)):
        call = call.replace("bert-base-chinese", str(tiny_model)).replace(
            "reviews.csv", str(reviews)
        )
        call = call.replace('"runs/mine"', f'"{folder / name}", {MORE}').replace(
            ", num_train_epochs=2", ""
        )
        call = call.replace("num_processes=2)", f'num_processes=2, use_port="{free_port()}")')
        script = folder / f"{name}.py"
        script.write_text(f'{train}\n\nif __name__ == "__main__":\n' + indent(call, "    "))
        assert "Traceback" not in recipe(script=str(script), pages=True).succeeded().err
    return folder


@pytest.mark.multiprocess
def test_a_notebook_trains_as_a_script_does(runs: Path) -> None:
    plain, notebook = runs / "plain", runs / "notebook"
    worlds = [
        json.loads((run / "config.json").read_text())["world"]["num_processes"]
        for run in (plain, notebook)
    ]
    assert (worlds, len(losses_of(plain))) == ([1, 2], 6)
    assert losses_of(notebook) == pytest.approx(losses_of(plain), rel=1e-5)
    assert (notebook / "report.html").is_file()


@pytest.mark.multiprocess
def test_predict_evaluate_convert(
    runs: Path, reviews: Path, tmp_path: Path, no_launcher: None, capsys: Any
) -> None:
    run = runs / "plain"
    first = examples()[0].replace("MODEL", f"{run}/model").replace("OUT", f"{tmp_path}/out")
    exec(first.replace("CHECKPOINT", f"{run}/checkpoints/best"), {})
    printed = capsys.readouterr().out.splitlines()
    assert re.match(
        r"\[\{'prediction': '(neg|pos)', 'probabilities': \[0\.\d+, 0\.\d+\]\}, \{", printed[0]
    )
    assert (tmp_path / "out" / "model.safetensors").is_file()
    rows = pd.read_csv(reviews)
    known = lines_of(run / "predictions.jsonl")
    texts = [rows["text"][line["id"]] for line in known]
    answers = toolkit.predict(run / "model", texts, per_device_batch_size=7)
    assert [line["prediction"] for line in answers] == [line["prediction"] for line in known]
    metrics = toolkit.evaluate(run / "model", texts, [line["label"] for line in known])
    assert metrics.items() <= lines_of(run / "eval.jsonl")[-1].items()
    assert {"accuracy", "f1_macro", "per_class"} <= set(metrics)
    for count, truth in ((2, ["pos"]), (0, [])):
        message = f"{count} texts and {len(truth)} labels"
        refusal(toolkit.evaluate, run / "model", texts[:count], truth, match=message)
    message = "texts, row 1: label 'good' does not occur in training: the classes are neg, pos"
    refusal(toolkit.evaluate, run / "model", texts[:1], ["good"], match=message)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, sharp_model: Path) -> Path:
    labels = Labels("single_label_classification", ("a", "b", "c"), ("label",))
    return classifier(sharp_model, tmp_path_factory.mktemp("run") / "model", labels)


def test_a_model_without_a_layer_of_its_config_is_not_loaded(
    model: Path, tmp_path: Path, no_launcher: None
) -> None:
    """As saved by a recipe that removes layers; transformers would initialize them randomly."""
    cut = AutoModelForSequenceClassification.from_pretrained(model)
    del cut.base_model.encoder.layer[-1]
    cut.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    refusal(toolkit.predict, tmp_path / "model", ["good"], says=["lacks", "encoder.layer.1."])


def test_anything_but_texts_is_refused(model: Path, tiny_model: Path, no_launcher: None) -> None:
    """Not the characters of a string, the names of columns, or "None"."""
    refusal(toolkit.predict, tiny_model, ["good"], match="no trained classification head")
    frame = pd.DataFrame({"text": ["good"], "label": ["a"]})
    for wrong, named in (("good", "str"), (b"good", "bytes"), (None, "NoneType"), (frame, "DataFrame"), (3, "int"),
                         ({"text": ["good"]}, "dict"), ({"good"}, "set"), (iter(["good"]), "list_iterator"),
                         (np.array([["good", "bad"]]), "ndarray")):  # fmt: skip
        refusal(toolkit.predict, model, wrong, says=[f"type {named}", "a list of str"])
    for wrong, row in ((["good", None], 2), (["good", ("good", "bad")], 2), ([("good", "bad"), "good"], 2),
                       ([("good", "bad", "dull")], 1), ([("good", None)], 1), ([3.5], 1),
                       (pd.Series(["good", float("nan")]), 2), (datasets.Dataset.from_pandas(frame), 1)):  # fmt: skip
        refusal(toolkit.predict, model, wrong, says=[f"texts, row {row}: ", "a list of str"])
    save_columns(model, text_pair="reply")
    refusal(toolkit.predict, model, ["good"], says=["reply", "(str, str)"])
    assert len(toolkit.predict(model, [("good", "bad")])) == 1
    save_columns(model)
