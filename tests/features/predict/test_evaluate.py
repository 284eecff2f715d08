"""toolkit/features/predict/evaluate.py: the labels of a file, empty texts, and what its processes compare."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from tests.faults import refusal
from tests.report.made import classifier
from tests.runs import lines_of
from toolkit import launch
from toolkit.cli import build_parser
from toolkit.data.labels import MULTI, Labels
from toolkit.data.table import Table
from toolkit.evaluation.saved_model import choose_labels, training_run
from toolkit.features.predict.command import _choose_output
from toolkit.features.predict.evaluate import _output_folder, evaluate_file

REST: dict[str, Any] = {"identity": {}, "launch": {}}  # of a run's config.json


def labels_of_file(
    labels: Labels, columns: dict[str, list[Any]], model: Any = "none", name: str | None = None
) -> Any:
    table = Table.of(datasets.Dataset.from_dict({"text": ["good", "bad"], **columns}), "new.csv", "")
    in_file: Any = choose_labels(str(model), table, name, labels)
    return in_file.encode(table).tolist()


def test_columns_are_matched_by_name() -> None:
    columns: dict[str, list[Any]] = {"sport": [1, 0], "finance": [0, 0]}
    classes = Labels(MULTI, ("finance", "sport"), ())
    assert labels_of_file(classes, columns, name="sport,finance") == [[0, 1], [0, 0]]
    outputs = Labels("regression", ("price", "taste"), ())
    assert labels_of_file(outputs, {"taste": [1.5, 2], "price": [9, 8]}, name="taste,price") == [
        [9, 1.5],
        [8, 2],
    ]
    says = ["sport, price", "finance, sport"]
    refusal(
        labels_of_file, classes, {"sport": [1, 0], "price": [0, 0]}, name="sport,price", says=says
    )


def test_labels_of_the_training_run(tmp_path: Path) -> None:
    """Its column, also where it was inferred and this file has one with a more usual name."""
    (tmp_path / "model").mkdir()
    data = {"label_columns": ["mood"]}
    (tmp_path / "config.json").write_text(json.dumps({"settings": {}, "data": data, **REST}))
    labels = Labels("single_label_classification", ("pos", "neg"), ())
    columns: dict[str, list[Any]] = {"label": ["neg", "neg"], "mood": ["pos", "neg"]}
    assert labels_of_file(labels, columns, tmp_path / "model") == [0, 1]
    assert labels_of_file(labels, columns, tmp_path / "model", "label") == [1, 1]


def test_the_run_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({"settings": {"seed": 3}, "data": {}, **REST})
    )
    names = {".": ["run/model", "run/model/"], "run": ["model"], "run/model": [".", "../model"]}
    for folder, models in names.items():
        monkeypatch.chdir(tmp_path / folder)
        assert [training_run(model)["settings"] for model in models] == [{"seed": 3}] * len(models)
    monkeypatch.chdir(tmp_path / "run")
    assert training_run("a-name-of-the-hub")["settings"] == {}


def test_pairs_and_the_model_that_processes_compare(
    sharp_model: Path, tmp_path: Path, no_launcher: None, toolkit_cache: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A pair with one empty text is named. Tokens that processes share are of this model: its files are in the facts
    that also name them in the cache."""
    labels = Labels("single_label_classification", ("a", "b"), ("label",))
    model = classifier(sharp_model, tmp_path / "model", labels)
    (tmp_path / "pairs.csv").write_text(
        "text,reply,label\ngood film,,a\n" + "bad room,fine,b\n" * 5
    )
    facts: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "require_equal", lambda *arguments: facts.append(arguments[2]))

    def evaluate(*more: str) -> None:
        words = [
            "evaluate",
            str(model),
            str(tmp_path / "pairs.csv"),
            "--mixed_precision",
            "no",
            *more,
        ]
        evaluate_file(build_parser().parse_args(words))

    options = SimpleNamespace(file="new.CSV.gz", output_dir=None)
    assert _output_folder(options) == Path("new.evaluation")
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "access", lambda *_: False)
        refusal(_output_folder, options, says=[str(Path.cwd()), "--output_dir"])
        predict = build_parser().parse_args(["predict", "m", str(tmp_path / "pairs.csv")])
        refusal(_choose_output, predict, says=[str(tmp_path), "--output"])
    evaluate("--text_pair", "reply")
    assert re.search(r"\b1 of 6 rows .*\(rows 1\)", capsys.readouterr().err)
    assert [
        line["id"] for line in lines_of(tmp_path / "pairs.evaluation" / "predictions.jsonl")
    ] == list(range(6))
    assert "· pairs.evaluation<" in (tmp_path / "pairs.evaluation" / "report.html").read_text(
        encoding="utf-8"
    )
    (model / "decisions.json").write_text('{"labels": ["a", "b"], "temperature": 2.0}')
    refusal(evaluate, "--text_pair", "reply", says=["pairs.evaluation exists", "--output_dir"])
    again = ("--output_dir", str(tmp_path / "again"))
    evaluate("--text_pair", "reply", *again)
    assert len({each["model"] for each in facts}) == len(facts) == 2
    (tmp_path / "config.json").write_text(
        json.dumps({"settings": {}, "data": {"text_pair": "second"}, **REST})
    )  # of the model's run
    third = ("--output_dir", str(tmp_path / "third"))
    refusal(evaluate, *third, says=["pairs.csv has no column 'second'", "--text_pair"])
