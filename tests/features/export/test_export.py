"""`toolkit export`: the exported model predicts like the original, or nothing is written."""

import argparse
import importlib.util
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import pytest

import toolkit
from tests.architectures import make_architecture
from tests.faults import refusal
from tests.runs import ROOT, Finished, start, train
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.self_test import check_folder
from toolkit.features.export import command
from toolkit.features.export.command import compare, export
from toolkit.features.export.runtimes import FILES

for runtime in ("openvino", "onnxruntime"):
    if importlib.util.find_spec(runtime) is None:
        pytest.skip(f"{runtime} is not installed", allow_module_level=True)
KINDS = [(to, int8) for to in FILES for int8 in (False, True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> Path:
    """The model of a run that overfits its few rows, so that its predictions are confident."""
    run = tmp_path_factory.mktemp("exported") / "run"
    words = ["--model_name_or_path", tiny_model, "--train_file", reviews]
    words += ["--max_steps", 80, "--data_seed", 1]
    words += ["--learning_rate", "5e-3", "--dropout", 0, "--report_to", "none"]
    train(*words, "--output_dir", run, pages=True)
    return run / "model"


@pytest.fixture(scope="module")
def exported(model: Path) -> dict[tuple[str, bool], tuple[Path, Finished]]:
    """(runtime, 8-bit) -> (the folder, the finished command)."""
    exports = {}
    for to, int8 in KINDS:
        out = model.parent / f"{to}-{int8}"
        # two answers of the run's 21 validation rows may change: this model has learned little
        words = ["--to", to, *["--int8"] * int8, "--max_changed", "10"]
        exports[to, int8] = out, start(["toolkit", "export", model, out, *words]).succeeded()
    return exports


@pytest.mark.parametrize(("to", "int8"), KINDS)
def test_equal_predictions(to: str, int8: bool, exported: Any, model: Path, reviews: Path) -> None:
    folder, done = exported[to, int8]
    result, command = done.out.splitlines()
    figures = r"accuracy [\d.]+ \(torch [\d.]+\), [\d.]+ % of the answers are the same"
    assert re.match(figures, result)
    assert command == f"wrote {folder}: toolkit predict {folder} FILE"
    files = {path.name for path in folder.iterdir()}
    kept = {"config.json", "tokenizer.json", "README.md", "sentence_bert_config.json"}
    assert files >= {FILES[to], *kept}
    assert not list(folder.glob("*.safetensors"))
    assert check_folder(str(model))
    assert check_folder(str(folder))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert result in card
    assert "## Labels" in card  # from the model's card
    texts = pandas.read_csv(reviews)["text"]
    mine, theirs = (pandas.DataFrame(toolkit.predict(path, texts)) for path in (folder, model))
    chances = [np.stack(table["probabilities"]) for table in (mine, theirs)]
    assert np.abs(chances[0] - chances[1]).max() < (0.3 if int8 else 1e-4)
    assert (mine["prediction"] == theirs["prediction"]).mean() > 0.95
    sizes = [sum(path.stat().st_size for path in exported[to, kind][0].iterdir())
             for kind in (False, True)]  # fmt: skip
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("to", FILES)
def test_the_docs_script(to: str, exported: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """By the runtime alone: names of inputs and outputs, any number of rows and tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "true")  # or openvino sends usage statistics
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    script, diff = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "diff"))
    if to == "onnx":
        for old, new in re.findall(r"^-(.+)\n\+(.+)\n", diff, re.MULTILINE):
            assert script.count(old) == 1
            script = script.replace(old, new)
    Path("script.py").write_text(script, encoding="utf-8")
    Path("OUT").symlink_to(exported[to, True][0])
    script_names = runpy.run_path("script.py")
    expected = toolkit.predict(exported[to, True][0], script_names["texts"])
    assert script_names["answers"] == [line["prediction"] for line in expected]


def test_no_usage_statistics(exported: Any, reviews: Path, tmp_path: Path) -> None:
    """openvino gives itself an id in `intel` before it sends the first."""
    words = ["predict", exported["openvino", True][0], reviews, "--output", tmp_path / "out.jsonl"]
    start(["toolkit", *words], env={"HOME": str(tmp_path)}).succeeded()
    assert not (tmp_path / "intel").exists()


def options(model: Path, out: Path, **more: Any) -> argparse.Namespace:
    defaults = {"to": "openvino", "int8": False, "max_changed": 2, "self_test": "error"}
    return argparse.Namespace(model=str(model), out=str(out), **(defaults | more))


def test_a_model_that_predicts_differently(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The error names the setting and a value that passes. decisions.json is copied."""
    run = shutil.copytree(model.parent, tmp_path / "run", symlinks=True)
    decisions = json.dumps({"labels": ["neg", "pos"], "temperature": 2.0})
    (run / "model" / "decisions.json").write_text(decisions)
    out = tmp_path / "out"
    monkeypatch.setattr(command, "compare", lambda *_: (4.7619, "95.24 % are the same"))
    message = refusal(export, options(run / "model", out, to="onnx"), match="95.24 % are the same")
    assert message.endswith("pass --max_changed 5")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    export(options(run / "model", out, to="onnx", max_changed=5))
    assert (out / "decisions.json").read_text() == decisions


def test_what_is_refused(model: Path, exported: Any, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    refusal(export, options(model, exported["openvino", False][0]), match="name another folder")
    copy = shutil.copytree(model, tmp_path / "alone")
    refusal(export, options(copy, out), match="is in no run's folder")
    sparse = make_architecture("BigBird", tmp_path / "sparse", ["a good film"])
    refusal(export, options(sparse, out), match="BigBird with block-sparse attention")
    with monkeypatch.context() as patch:
        unknown = Mock(side_effect=AttributeError("no rule for aten::x\nmore"))
        patch.setattr(command, "convert", unknown)
        says = ["BertForSequenceClassification", "no rule for aten::x", "toolkit predict"]
        refusal(export, options(model, out), says=says)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    refusal(export, options(model, out), match="toolkit prepare")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    packages = r"needs openvino and nncf: pip install 'finetune-toolkit\[openvino\]'"
    refusal(export, options(model, out, int8=True), match=packages)


def test_compare() -> None:
    rows, scores = np.arange(4), np.array([[2.0, 1], [1, 2], [3, 0], [0, 1]])
    other = np.array([[2.0, 1], [2, 1], [3, 0], [1, 0]])
    flags, number = (scores > 1.5) * 1.0, scores[:, :1]
    for kind, before, after, truth, changed, says in (
        (SINGLE, scores, other, [0, 0, 0, 1], 50, "accuracy 0.7500 (torch 0.7500), 50.00 % of the"),
        (MULTI, scores - 1.5, other - 1.5, flags, 25, "75.00 % of the answers are"),
        (REGRESSION, number, number + 0.1, scores[:, 0], 0.8, "99.20 % of the variance of"),
    ):
        split = Split("validation", Path(), rows * 0, np.arange(5), np.array(truth), rows)
        labels = Labels(kind, ("a", "b")[: before.shape[1]], ())
        percent, sentence = compare(before, after, split, labels)
        assert percent == pytest.approx(changed)
        assert says in sentence
        assert sentence.endswith("on 4 rows of validation")
