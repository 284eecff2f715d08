"""`toolkit export`: the exported model predicts like the original, or nothing is written."""

import argparse
import importlib.util
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

import toolkit
from tests.architectures import make_architecture
from tests.faults import refusal
from tests.runs import ROOT, Finished, lines_of, start, train
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.saved_model import SavedModel
from toolkit.features.export.command import compare, export
from toolkit.features.export.runtimes import ExportedClassifier

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"the extra `{extra}` is not installed"
    )
    for name, extra in (("openvino", "openvino"), ("onnxruntime", "onnx"))
]
FILES = {"openvino": "openvino_model.xml", "onnx": "model.onnx"}
KINDS = [(to, int8) for to in FILES for int8 in (False, True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> Path:
    """The model of a run that overfits its few rows, so that its predictions are confident."""
    run = tmp_path_factory.mktemp("exported") / "run"
    train("--model_name_or_path", tiny_model, "--train_file", reviews, "--max_steps", 80, "--report_to", "none",
          "--learning_rate", "5e-3", "--dropout", 0, "--output_dir", run, pages=True)  # fmt: skip
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
def test_the_exported_model_predicts_the_same(
    to: str, int8: bool, exported: Any, model: Path, reviews: Path
) -> None:
    folder, done = exported[to, int8]
    result = re.search(
        r"accuracy [\d.]+ \(torch [\d.]+\), ([\d.]+) % of the answers are the same", done.out
    )
    assert result
    assert {path.name for path in folder.iterdir()} >= {
        FILES[to],
        "config.json",
        "tokenizer.json",
        "README.md",
    }
    assert not list(folder.glob("*.safetensors"))
    assert AutoConfig.from_pretrained(folder).id2label == {0: "neg", 1: "pos"}
    limits = {AutoTokenizer.from_pretrained(path).model_max_length for path in (folder, model)}
    assert len(limits) == 1
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert result[0] in card
    assert "## Labels" in card  # from the model's card
    mine, theirs = (
        toolkit.predict(path, pandas.read_csv(reviews)["text"]) for path in (folder, model)
    )
    chances = [np.array([line["probabilities"] for line in lines]) for lines in (mine, theirs)]
    assert np.abs(chances[0] - chances[1]).max() < (0.3 if int8 else 1e-4)
    assert (
        np.mean([a["prediction"] == b["prediction"] for a, b in zip(mine, theirs, strict=True)])
        > 0.95
    )
    whole, packed = (
        sum(path.stat().st_size for path in exported[to, kind][0].iterdir())
        for kind in (False, True)
    )
    assert packed < whole


@pytest.mark.parametrize("to", FILES)
def test_any_number_of_rows(to: str, exported: Any) -> None:
    """A batch may be computed in parts; each row gets the logits that it gets alone."""
    folder, _ = exported[to, False]
    model = ExportedClassifier(folder, AutoConfig.from_pretrained(folder))
    ids = torch.randint(5, 40, (5, 9), generator=torch.Generator().manual_seed(0))
    alone = torch.cat([model(input_ids=row[None]).logits for row in ids])
    for rows in (1, 2, 3, 5):
        torch.testing.assert_close(
            model(input_ids=ids[:rows]).logits, alone[:rows], rtol=0, atol=1e-5
        )
    assert len(alone.unique(dim=0)) == 5


def test_the_docs_script(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "true")  # or openvino sends usage statistics
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    script, diff = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("python", "diff")
    )
    for to in ("openvino", "onnx"):
        for old, new in re.findall(r"^-(.+)\n\+(.+)\n", diff, re.MULTILINE) if to == "onnx" else ():
            assert script.count(old) == 1
            script = script.replace(old, new)
        Path("script.py").write_text(script, encoding="utf-8")
        Path("OUT").unlink(missing_ok=True)
        Path("OUT").symlink_to(exported[to, True][0])
        script_names = runpy.run_path("script.py")
        expected = toolkit.predict(exported[to, True][0], script_names["texts"])
        assert script_names["answers"] == [line["prediction"] for line in expected]


def test_no_usage_statistics(exported: Any, reviews: Path, tmp_path: Path) -> None:
    """openvino gives itself an id in `intel` before it sends the first."""
    words = ["predict", exported["openvino", True][0], reviews, "--output", tmp_path / "out.jsonl"]
    start(["toolkit", *words], env={"HOME": str(tmp_path)}).succeeded()
    assert not (tmp_path / "intel").exists()


def test_what_servers_need(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """text-embeddings-inference's router with its ONNX Runtime backend, and OpenVINO."""
    monkeypatch.setenv("CI", "true")  # or openvino sends usage statistics
    import onnxruntime
    import openvino

    config = json.loads((exported["onnx", True][0] / "config.json").read_text())
    assert config["architectures"][0].endswith("Classification")
    assert all(isinstance(config[name], int) for name in ("max_position_embeddings", "pad_token_id", "hidden_size",
                                                          "num_hidden_layers"))  # fmt: skip
    assert (config["id2label"], config["label2id"]) == (
        {"0": "neg", "1": "pos"},
        {"neg": 0, "pos": 1},
    )
    names = ["input_ids", "attention_mask", "token_type_ids"]
    session = onnxruntime.InferenceSession(exported["onnx", True][0] / "model.onnx")
    assert [port.name for port in session.get_inputs()] == names
    assert [(port.name, port.type) for port in session.get_outputs()] == [
        ("logits", "tensor(float)")
    ]
    graph = openvino.Core().read_model(exported["openvino", True][0] / "openvino_model.xml")
    assert [port.any_name for port in graph.inputs] == names
    assert all(
        port.partial_shape.is_dynamic and port.partial_shape.rank == 2 for port in graph.inputs
    )


def options(model: Path, out: Path, **more: Any) -> argparse.Namespace:
    defaults = {"to": "openvino", "int8": False, "max_changed": 2}
    return argparse.Namespace(model=str(model), out=str(out), **(defaults | more))


def test_a_model_that_predicts_differently(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the setting and the value that passes. One prediction of 21 changes."""
    labels = [line["label"] for line in lines_of(model.parent / "predictions.jsonl")]
    before = np.eye(2)[[int(label == "pos") for label in labels]]
    after = before.copy()
    after[0] = before[0, ::-1]
    outputs = iter([before, after] * 2)
    monkeypatch.setattr(SavedModel, "compute_outputs", lambda *_: next(outputs))
    out = tmp_path / "out"
    message = refusal(export, options(model, out), match="on 21 rows")
    assert message.endswith("pass --max_changed 4.77")
    assert not list(tmp_path.iterdir())
    export(options(model, out, max_changed=4.77))
    assert out.is_dir()


def test_what_cannot_be_exported(
    model: Path, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = exported["openvino", False]
    refusal(export, options(model, folder), match="exists: name another folder")
    copy = shutil.copytree(model, tmp_path / "alone")
    refusal(export, options(copy, tmp_path / "out"), match="is in no run's folder")
    sparse = make_architecture("BigBird", tmp_path / "sparse", ["a good film"])
    refusal(export, options(sparse, tmp_path / "out"), match="BigBird with block-sparse attention")
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    refusal(export, options(model, tmp_path / "out"), match="toolkit prepare")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    in_8_bits = options(model, tmp_path / "out", int8=True)
    packages = r"needs openvino and nncf: pip install 'finetune-toolkit\[openvino\]'"
    refusal(export, in_8_bits, match=packages)


def test_decisions_are_copied(model: Path, tmp_path: Path) -> None:
    run = shutil.copytree(model.parent, tmp_path / "run", symlinks=True)
    decisions = {"labels": ["neg", "pos"], "temperature": 2.0}
    (run / "model" / "decisions.json").write_text(json.dumps(decisions))
    export(options(run / "model", tmp_path / "out", to="onnx"))
    assert json.loads((tmp_path / "out" / "decisions.json").read_text()) == decisions


def test_compare() -> None:
    def percent_of(before: np.ndarray, after: np.ndarray, truth: Any, kind: Any) -> Any:
        names = ("a", "b")[: before.shape[1]]
        count = len(before)
        ids = np.zeros(count, np.int32)
        split = Split(
            "validation", Path(), ids, np.arange(count + 1), np.array(truth), np.arange(count)
        )
        return compare(before, after, split, Labels(kind, names, ()))

    logits = np.array([[2.0, 1], [1, 2], [3, 0], [0, 1]])
    other = np.array([[2.0, 1], [2, 1], [3, 0], [1, 0]])
    changed, result = percent_of(logits, other, [0, 0, 0, 1], "single_label_classification")
    assert result == (
        "accuracy 0.7500 (torch 0.7500), 50.00 % of the answers are the same, on 4 rows of "
        "validation"
    )
    assert changed == 50
    truth = (logits > 1.5).astype(np.float32)
    kind = "multi_label_classification"
    assert percent_of(logits - 1.5, other - 1.5, truth, kind)[0] == 25
    numbers = logits[:, :1]
    changed, _ = percent_of(numbers, numbers + 0.1, truth[:, 0], "regression")
    assert changed == pytest.approx(100 * 4 * 0.01 / 5)
