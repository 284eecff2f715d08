"""`toolkit evaluate`: the labels of a file, pairs, and the run that trained the model."""

import json
import math
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

import toolkit
from tests.evaluation.columns import save_columns
from tests.faults import refusal
from tests.report.made import classifier
from tests.runs import lines_of
from toolkit.cli import build_parser
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, Labels
from toolkit.data.table import Table
from toolkit.evaluation.saved_model import choose_labels, training_run
from toolkit.features.predict.evaluate import evaluate_file


def labels_of_file(
    labels: Labels, columns: dict[str, list[Any]], model: Any = "none", name: str | None = None
) -> Any:
    rows = datasets.Dataset.from_dict({"text": ["good", "bad"], **columns})
    table = Table.of(rows, "new.csv")
    return choose_labels(str(model), table, name, labels).encode(table).tolist()


def test_columns_are_matched_by_name() -> None:
    classes = Labels(MULTI, ("finance", "sport"), ())
    columns: dict[str, list[Any]] = {"sport": [1, 0], "finance": [0, 0]}
    assert labels_of_file(classes, columns, name="sport,finance") == [[0, 1], [0, 0]]
    outputs = Labels(REGRESSION, ("price", "taste"), ())
    columns = {"taste": [1.5, 2], "price": [9, 8]}
    assert labels_of_file(outputs, columns, name="taste,price") == [[9, 1.5], [8, 2]]
    columns = {"sport": [1, 0], "price": [0, 0]}
    says = ["sport, price", "finance, sport"]
    refusal(labels_of_file, classes, columns, name="sport,price", says=says)


def test_the_label_column_of_the_training_file(tmp_path: Path) -> None:
    """Also where this file has one with a more usual name."""
    save_columns(tmp_path, label_columns=["mood"])
    labels = Labels(SINGLE, ("pos", "neg"), ())
    columns: dict[str, list[Any]] = {"label": ["neg", "neg"], "mood": ["pos", "neg"]}
    assert labels_of_file(labels, columns, tmp_path) == [0, 1]
    assert labels_of_file(labels, columns, tmp_path, "label") == [1, 1]
    refusal(labels_of_file, labels, {}, match="which column is the label")


def test_the_run_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": {"seed": 3}, "data": {}}))
    names = {".": ["run/model", "run/model/"], "run": ["model"], "run/model": [".", "../model"]}
    for folder, models in names.items():
        monkeypatch.chdir(tmp_path / folder)
        assert [training_run(model)["settings"] for model in models] == [{"seed": 3}] * len(models)
    assert training_run("a-name-of-the-hub")["settings"] == {}


def test_an_evaluation_of_pairs(
    sharp_model: Path, tmp_path: Path, no_launcher: None, toolkit_cache: Path, capsys: Any
) -> None:
    """A pair with one empty text is named; what exists is not overwritten; the pair of the training
    file is read."""
    model = classifier(sharp_model, tmp_path / "model", Labels(SINGLE, ("a", "b"), ("label",)))
    file, out = tmp_path / "pairs.CSV", tmp_path / "pairs.evaluation"
    file.write_text("text,reply,label\ngood film,,a\n" + "bad room,fine,b\n" * 5)

    def evaluate(*more: str) -> None:
        words = ["evaluate", str(model), str(file), "--mixed_precision", "no", *more]
        evaluate_file(build_parser().parse_args(words))

    evaluate("--text_pair", "reply")
    assert re.search(r"\b1 of 6 rows .*\(rows 1\)", capsys.readouterr().err)
    assert [line["id"] for line in lines_of(out / "predictions.jsonl")] == list(range(6))
    assert "· pairs.evaluation<" in (out / "report.html").read_text(encoding="utf-8")
    (numbers,) = lines_of(out / "eval.jsonl")
    texts, truth = [("good film", ""), *[("bad room", "fine")] * 5], ["a", *"bbbbb"]
    expected = toolkit.evaluate(model, texts, truth, mixed_precision="no")
    assert {name: numbers[name] for name in expected} == expected
    answers = toolkit.predict(model, texts, mixed_precision="no")
    chances = [dict(zip("ab", answer["probabilities"], strict=True)) for answer in answers]
    losses = [-math.log(each[label]) for each, label in zip(chances, truth, strict=True)]
    assert numbers["loss"] == pytest.approx(sum(losses) / 6, rel=1e-3)
    refusal(evaluate, "--text_pair", "reply", says=["pairs.evaluation exists", "--output_dir"])
    save_columns(model, text_pair="second")
    third = ("--output_dir", str(tmp_path / "third"))
    refusal(evaluate, *third, says=["pairs.CSV has no column 'second'", "--text_pair"])
