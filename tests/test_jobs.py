"""Complete jobs: every kind of label, prediction of files. The demo: tests/commands/test_init.py."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests import inputs
from tests.matrix import runs
from tests.runs import lines_of, start

F1 = {"accuracy", "f1_macro", "f1_weighted", "per_class"}
EXPECTED = {
    "six classes": {*F1, "confusion_matrix"},
    "multi-label": {*F1, "f1_micro"},
    "regression": {"mse", "mae", "pearson"},
    "several numbers": {"mse", "mae", "pearson", "per_output"},
}
FILES = ("config.json", "metrics.jsonl", "report.html", "model/config.json", "model/README.md")


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_kind_of_label(kind: str) -> None:
    run = runs("ddp x2")[kind]
    last = lines_of(run / "eval.jsonl")[-1]
    assert set(last) == {"step", "split", "num_samples", "loss"} | EXPECTED[kind]
    assert (last["split"], last["num_samples"]) == ("test", 23)
    lines = lines_of(run / "predictions.jsonl")
    assert [line["id"] for line in lines] == list(range(23))
    rows = lines_of(inputs.labelled(kind, "test"))
    truth = [row.get("label", [row.get("length"), row.get("good")]) for row in rows]
    expected = truth if kind in ("six classes", "multi-label") else pytest.approx(np.array(truth))
    assert [line["label"] for line in lines] == expected
    labels = json.loads((run / "config.json").read_text())["data"]["labels"]
    if kind == "six classes":
        assert labels == [f"class {number}" for number in (0, 2, 4, 6, 8, 10)]
    if kind == "several numbers":
        assert labels == list(last["per_output"]) == ["length", "good"]
        answers = np.array([line["prediction"] for line in lines])
        errors = ((answers - np.array(truth)) ** 2).mean(axis=0)
        each_mse = [each["mse"] for each in last["per_output"].values()]
        assert each_mse == pytest.approx(errors, rel=1e-4)
        assert [last["loss"], last["mse"]] == pytest.approx([errors.mean()] * 2, rel=1e-4)
    for name in FILES:
        assert (run / name).stat().st_size > 0


def test_predict_answers_for_texts_and_lines_of_a_file(tmp_path: Path, toolkit_cache: Path) -> None:
    model, numbers = (runs("ddp x2")[kind] / "model" for kind in ("six classes", "several numbers"))
    file, answers = tmp_path / "new.txt", tmp_path / "new.predictions.csv"
    texts = ["good film", "", "very dull room"]
    file.write_text("\n".join(texts) + "\n")
    start(["toolkit", "predict", model, file]).succeeded()
    table = pd.read_csv(answers, keep_default_na=False)
    assert table["text"].to_list() == texts
    cached = sorted(toolkit_cache.glob("tokens/*"))
    typed = [word for text in texts for word in ("--text", text)]
    finished = start(["toolkit", "predict", model, *typed]).succeeded()
    for row, answer in enumerate(map(json.loads, finished.out.splitlines())):
        assert (answer["text"], answer["prediction"]) == (texts[row], table["prediction"][row])
        chances = table.filter(like="probability_").loc[row].to_list()
        assert answer["probabilities"] == pytest.approx(chances, abs=2e-6)
    assert sorted(toolkit_cache.glob("tokens/*")) == cached  # what was typed is not cached
    start(["toolkit", "predict", numbers, file, "--overwrite"]).succeeded()
    assert list(pd.read_csv(answers))[1:] == ["prediction_length", "prediction_good"]
    both = start(["toolkit", "predict", model, file, "--text", "a"])
    both.says_in_one_line("--text", "FILE")
