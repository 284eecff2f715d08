"""`toolkit folds` and `toolkit correct-labels`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.faults import refusal
from tests.report.made import make_run
from tests.report.test_html import single
from tests.runs import ROOT, lines_of, start, train
from toolkit.cli import build_parser
from toolkit.config import TextSettings
from toolkit.data.labels import MULTI, SINGLE, Labels
from toolkit.data.read import read_file
from toolkit.features.folds import command, correct
from toolkit.features.folds.command import held_out_rows, write_part
from toolkit.features.folds.page import predictions, write_page
from toolkit.features.folds.suspects import cells_by_label, find_suspects

NAMES = ("a", "b")


def table_of(folder: Path, columns: dict[str, list[Any]]) -> Any:
    path = folder / "rows.jsonl"
    pd.DataFrame(columns).to_json(path, orient="records", lines=True, force_ascii=False)
    return read_file(str(path), TextSettings())


def test_each_row_is_held_out_once_with_its_duplicates(tmp_path: Path) -> None:
    texts = [f"text {row % 50}" for row in range(60)]
    labels = ["rare" if row % 50 < 5 else "common" for row in range(60)]
    table = table_of(tmp_path, {"text": texts, "label": labels})
    parts = held_out_rows(texts, labels, 5, 3)
    assert sorted(np.concatenate(parts)) == list(range(60))
    for rows in parts:
        assert sum(labels[row] == "rare" for row in rows) == 2
        others = set(range(60)).difference(rows.tolist())
        assert {texts[row] for row in rows}.isdisjoint(texts[row] for row in others)
        write_part(tmp_path / "part.parquet", table, np.isin(np.arange(60), rows))
        written = read_file(str(tmp_path / "part.parquet"), TextSettings()).rows
        assert written["text"][:] == [texts[row] for row in rows]
    assert all(map(np.array_equal, parts, held_out_rows(texts, labels, 5, 3)))
    numbers = [str(row / 7) for row in range(60)]
    assert len(held_out_rows(texts, numbers, 4, 0)) == 4


def test_planted_errors_are_found_the_most_certain_first() -> None:
    chances = np.full((60, 3), 0.1)
    chances[np.arange(60), np.arange(60) % 3] = 0.8
    chances[7] = [0.05, 0.05, 0.9]
    chances[20] = [0.85, 0.05, 0.1]
    lines, _ = single("abc", chances, [row % 3 for row in range(60)])
    suspects = find_suspects(lines, {"problem_type": SINGLE, "labels": ["a", "b", "c"]})
    assert [(line["id"], line["prediction"]) for line in suspects] == [(21, "c"), (60, "a")]


def test_several_labels_that_no_row_has_together(tmp_path: Path) -> None:
    """They are written as the file writes others."""
    for cells, separator, both in (
        ({"tags": [["a"], ["b"], []]}, None, {"tags": ["a", "b"]}),
        ({"tags": ['["a"]', '["b"]', "[]"]}, None, {"tags": '["a", "b"]'}),
        ({"tags": ["a", "b", ""]}, ";", {"tags": "a;b"}),
        ({"a": ["1", "0", "0"], "b": ["0", "1", "0"]}, None, {"a": "1", "b": "1"}),
    ):
        columns = {name: column * 20 for name, column in cells.items()}
        table = table_of(tmp_path, {"text": [str(row) for row in range(60)], **columns})
        lines = []
        for row, label in enumerate([["a"], ["b"], []] * 20):
            chances = [0.9 if name in label else 0.1 for name in NAMES]
            lines.append({"id": row, "label": label, "prediction": label, "probabilities": chances})
        lines[4] |= {"prediction": ["a", "b"], "probabilities": [0.95, 0.95]}
        data = {"problem_type": MULTI, "labels": NAMES, "label_columns": list(columns)}
        data["label_separator"] = separator
        suspects = find_suspects(lines, data)
        assert [line["id"] for line in suspects] == [4]
        written = cells_by_label(lines, suspects, table, data)
        assert written['["a", "b"]'] == both
        assert written['["b"]'] == {name: column[1] for name, column in cells.items()}


def test_the_page_and_its_corrections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two folds of 30 rows with a planted wrong label in row 7; a suggestion is written as the
    file writes this class."""
    classes = [int((row % 5 == 0) ^ (row == 7)) for row in range(60)]
    texts = [f"text {row}" for row in range(60)]
    cells = {"text": texts, "label": ["AB"[each] for each in classes], "source": ["x", "y"] * 30}
    table = table_of(tmp_path, cells)
    labels = Labels(SINGLE, NAMES, ("label",))
    lines = []
    for fold, rows in enumerate([np.arange(0, 60, 2), np.arange(1, 60, 2)], 1):
        chances = np.array([[0.1, 0.9] if row % 5 == 0 else [0.9, 0.1] for row in rows])
        of_fold, numbers = single(NAMES, chances, [classes[row] for row in rows])
        of_fold = [line | {"id": place} for place, line in enumerate(of_fold)]
        make_run(tmp_path / f"fold-{fold}", labels, of_fold, numbers, label_columns=["label"])
        lines += predictions(tmp_path, fold, rows, texts)
    printed = write_page(tmp_path, table, lines, 2)
    assert "suspected labels: 1\n" in printed
    assert "60 rows out of fold, mean of 2 folds: loss 0.5000  accuracy 0.7500" in printed
    out_of_fold = lines_of(tmp_path / "out_of_fold.jsonl")
    assert [(line["id"], line["text"]) for line in out_of_fold] == list(enumerate(texts))
    (error,) = lines_of(tmp_path / "label_errors.jsonl")
    assert (error["id"], error["label"], error["prediction"]) == (7, "b", "a")
    assert error["cells"] == {"label": "A"}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "text 7" in page
    assert error["data"] in page

    def apply(file: str, output: str, *corrections: Any) -> None:
        path = tmp_path / "corrections.jsonl"
        path.write_text("".join(f"{json.dumps(each)}\n\n" for each in corrections))
        words = ["correct-labels", tmp_path / file, path, tmp_path / output]
        correct.run(build_parser().parse_args([*map(str, words)]))

    apply("rows.jsonl", "out.csv", error, {"id": 8, "data": error["data"], "cells": None})
    assert "59 rows, 1 corrected, 1 left out" in capsys.readouterr().out
    written = pd.read_csv(tmp_path / "out.csv")
    expected = table.rows.to_pandas()
    expected.loc[7, "label"] = "A"
    expected = expected.drop(index=8).reset_index(drop=True)
    pd.testing.assert_frame_equal(written.astype(str), expected.astype(str))
    wrong_name = error | {"cells": {"lable": "A"}}
    for file, output, corrections, says in (
        ("rows.jsonl", "out.csv", [error], ["out.csv exists"]),
        ("out.csv", "two.csv", [error], ["id 7", "other data"]),
        ("rows.jsonl", "two.csv", [wrong_name], ["id 7", "other data"]),
        ("rows.jsonl", "two.csv", [{"id": 7}], ["line 1", "id, data and cells"]),
        ("rows.jsonl", "two.csv", [error, error], ["id 7", "two corrections"]),
    ):
        refusal(apply, file, output, *corrections, says=says)
    assert not (tmp_path / "two.csv").exists()
    (tmp_path / "fold-1" / "predictions.jsonl").write_text("")  # of an evaluation of other rows
    refusal(predictions, tmp_path, 1, np.arange(30), texts, says=["fold-1", "--test_file"])


def test_a_missing_file_is_named_before_anything_runs(tmp_path: Path) -> None:
    """Unknown settings: tests/features/sweep/test_sweep.py."""
    words = ["folds", str(ROOT / "recipes/cls.py"), "--output_dir", str(tmp_path / "f")]
    refusal(command.run, *build_parser().parse_known_args(words), says=["--train_file"])
    assert not (tmp_path / "f").exists()


def test_a_recipe_in_folds(tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    """Every row once, by a model that has not seen it; the same command repeats nothing. A model
    that was trained on all labels is refused."""
    settings = ["--train_file", reviews, "--max_steps", 2, "--report_to", "none"]
    settings += ["--max_length", 16, "--global_batch_size", 8, "--model_name_or_path"]
    words = ["folds", "recipes/cls.py", "--folds", 2, *settings]
    folds = ["toolkit", *words, tiny_model, "--output_dir", tmp_path / "folds"]
    assert "suspected labels" in start(folds).succeeded().out
    rows = pd.read_csv(reviews)
    lines = lines_of(tmp_path / "folds" / "out_of_fold.jsonl")
    assert [line["id"] for line in lines] == list(range(len(rows)))
    assert {line["fold"] for line in lines} == {1, 2}
    assert [line["text"] for line in lines] == list(rows["text"])
    assert [line["label"] for line in lines] == list(rows["label"].astype(str))
    again = start(folds).succeeded()
    assert "fold-1:" not in again.out
    train(*settings, tiny_model, "--output_dir", tmp_path / "run")
    parsed = build_parser().parse_known_args([*map(str, words), str(tmp_path / "run" / "model")])
    refusal(command.run, *parsed, says=["--model_name_or_path", "labels of these rows"])
