"""`toolkit folds` and `toolkit correct-labels`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.faults import refusal
from tests.report.made import make_run
from tests.report.test_html import single
from tests.runs import ROOT, lines_of, start
from toolkit.cli import build_parser
from toolkit.config import TextSettings
from toolkit.data.labels import MULTI, SINGLE, Labels
from toolkit.data.read import read_file
from toolkit.features.folds import command, correct
from toolkit.features.folds.page import balanced_skill, write_page
from toolkit.features.folds.split import held_out_rows, row_digest, texts_of, write_part
from toolkit.features.folds.suspects import find_suspects

NAMES = ("a", "b")


def table_of(folder: Path, columns: dict[str, list[Any]], name: str = "rows.jsonl") -> Any:
    rows = pd.DataFrame(columns)
    rows.to_json(folder / name, orient="records", lines=True, force_ascii=False)
    return read_file(str(folder / name), TextSettings())


def test_each_row_is_held_out_once_with_its_duplicates(tmp_path: Path) -> None:
    texts = [f"text {row % 50}" for row in range(60)]
    labels = ["rare" if row % 50 < 5 else "common" for row in range(60)]
    table = table_of(tmp_path, {"text": texts, "label": labels})
    parts = held_out_rows(table, texts_of(table, "text", None), ["label"], 5, 3)
    assert sorted(np.concatenate(parts)) == list(range(60))
    for rows in parts:
        assert sum(labels[row] == "rare" for row in rows) == 2
        others = set(range(60)).difference(rows.tolist())
        assert {texts[row] for row in rows}.isdisjoint(texts[row] for row in others)
        write_part(tmp_path / "part.parquet", table, rows)
        written = read_file(str(tmp_path / "part.parquet"), TextSettings()).rows
        assert written["text"][:] == [texts[row] for row in rows]
    again = held_out_rows(table, texts, ["label"], 5, 3)
    assert all(map(np.array_equal, parts, again))
    numbers = table_of(tmp_path, {"text": texts, "label": [row / 7 for row in range(60)]})
    assert len(held_out_rows(numbers, texts, ["label"], 4, 0)) == 4
    refusal(held_out_rows, table, ["same"] * 60, ["label"], 2, 0, says=["1 different", "--folds 2"])


def test_planted_errors_are_found_the_most_certain_first() -> None:
    truth = np.arange(60) % 3
    probabilities = np.full((60, 3), 0.1)
    probabilities[np.arange(60), truth] = 0.8
    probabilities[7] = [0.05, 0.05, 0.9]
    probabilities[20] = [0.85, 0.05, 0.1]
    labels = Labels(SINGLE, ("a", "b", "c"), ("label",))
    lines = [
        {"id": row, "label": "abc"[place], "probabilities": probabilities[row].tolist()}
        for row, place in enumerate(truth)
    ]
    found = find_suspects(lines, truth, labels)
    assert [(line["id"], line["label"]) for line in found] == [(7, "c"), (20, "a")]
    several = np.stack([truth == 0, truth == 1], axis=1).astype(float)
    chances = np.where(several, 0.9, 0.1)
    chances[4] = [0.95, 0.95]
    lines = [
        {"id": row, "label": [n for n, on in zip(NAMES, flags, strict=True) if on],
         "probabilities": chances[row].tolist()}
        for row, flags in enumerate(several)
    ]  # fmt: skip
    (found,) = find_suspects(lines, several, Labels(MULTI, NAMES, ("tags",)))
    assert (found["id"], found["label"]) == (4, ["a", "b"])
    assert balanced_skill(truth, np.zeros(60, int)) == 0
    assert balanced_skill(truth, truth) == 1


@pytest.fixture
def folds(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes the page of two folds of 30 rows with a planted wrong label in row 7."""

    def write(**columns: list[Any]) -> list[str]:
        table = table_of(tmp_path, {"text": [f"text {row}" for row in range(60)], **columns})
        held_out = [np.arange(0, 60, 2), np.arange(1, 60, 2)]
        for fold, rows in enumerate(held_out, 1):
            classes = [(row % 5 == 0) ^ (row == 7) for row in rows]
            chances = np.array([[0.1, 0.9] if row % 5 == 0 else [0.9, 0.1] for row in rows])
            lines, numbers = single(NAMES, chances, [int(each) for each in classes])
            lines = [{**line, "id": place} for place, line in enumerate(lines)]
            make_run(tmp_path / f"fold-{fold}", Labels(SINGLE, NAMES, ("label",)), lines, numbers)
        texts = texts_of(table, "text", None)
        return write_page(tmp_path, table, texts, ["label"], held_out)

    return write


def test_the_page_and_its_corrections(
    folds: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A suggestion is written as the file writes this class."""
    cells = ["B" if (row % 5 == 0) ^ (row == 7) else "A" for row in range(60)]
    lines = folds(label=cells, source=["x", "y"] * 30)
    assert lines[:2] == [f"out of fold, 60 rows: {lines[0].split(': ')[1]}", "suspected labels: 1"]
    assert "accuracy 0.9833" in lines[0]
    out_of_fold = lines_of(tmp_path / "out_of_fold.jsonl")
    assert [line["id"] for line in out_of_fold] == list(range(60))
    assert [line["text"] for line in out_of_fold] == [f"text {row}" for row in range(60)]
    (error,) = lines_of(tmp_path / "label_errors.jsonl")
    assert (error["id"], error["original_label"], error["label"]) == (7, "b", "a")
    assert error["cells"] == {"label": "A"}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "text 7" in page
    assert error["row_digest"] in page
    leave_out = {"id": 8, "cells": None}
    table = read_file(str(tmp_path / "rows.jsonl"), TextSettings())
    leave_out["row_digest"] = row_digest(["text 8", cells[8], "x"])
    corrections = tmp_path / "corrections.jsonl"
    corrections.write_text(f"{json.dumps(error)}\n\n{json.dumps(leave_out)}\n")

    def apply(*words: Any) -> None:
        correct.run(build_parser().parse_args(["correct-labels", *map(str, words)]))

    apply(tmp_path / "rows.jsonl", corrections, tmp_path / "out.csv")
    assert "59 rows, 1 corrected, 1 left out" in capsys.readouterr().out
    written = pd.read_csv(tmp_path / "out.csv")
    expected = table.rows.to_pandas()
    expected.loc[7, "label"] = "A"
    pd.testing.assert_frame_equal(
        written.astype(str), expected.drop(index=8).reset_index(drop=True).astype(str)
    )
    refusal(
        apply, tmp_path / "rows.jsonl", corrections, tmp_path / "out.csv", says=["out.csv exists"]
    )
    refusal(
        apply,
        tmp_path / "out.csv",
        corrections,
        tmp_path / "two.csv",
        says=["row 8", "other cells"],
    )
    corrections.write_text('{"id": 7}\n')
    refusal(
        apply,
        tmp_path / "rows.jsonl",
        corrections,
        tmp_path / "two.csv",
        says=["line 1", "row_digest"],
    )


@pytest.mark.parametrize(("words", "says"), [
    ([], ["--train_file"]),
    (["--folds", "1"], ["--folds 1"]),
    (["--train_file", "x.csv", "--test_file", "y.csv"], ["--test_file"]),
    (["--train_file", "x.csv", "--validation_split", "0.2"], ["--validation_split", "--validation_file"]),
])  # fmt: skip
def test_faults_are_named_before_anything_runs(
    words: list[str], says: list[str], tmp_path: Path
) -> None:
    model = [] if "x.csv" not in words else ["--model_name_or_path", "m"]
    parsed = build_parser().parse_known_args(
        ["folds", str(ROOT / "recipes/cls.py"), "--output_dir", str(tmp_path / "f"), *words, *model]
    )
    refusal(command.run, *parsed, says=says)
    assert not (tmp_path / "f").exists()


def test_a_recipe_in_folds(tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    """Every row once, by a model that has not seen it; the same command repeats nothing."""
    words = ["toolkit", "folds", "recipes/cls.py", "--train_file", reviews, "--folds", 2, "--model_name_or_path",
             tiny_model, "--max_steps", 2, "--report_to", "none", "--max_length", 16, "--global_batch_size", 8,
             "--output_dir", tmp_path / "folds"]  # fmt: skip
    done = start(words).succeeded()
    assert "suspected labels" in done.out
    count = len(pd.read_csv(reviews))
    lines = lines_of(tmp_path / "folds" / "out_of_fold.jsonl")
    assert [line["id"] for line in lines] == list(range(count))
    assert {line["fold"] for line in lines} == {1, 2}
    rows = pd.read_csv(reviews)
    assert [line["text"] for line in lines] == list(rows["text"])
    assert [line["label"] for line in lines] == list(rows["label"].astype(str))
    again = start(words).succeeded()
    assert "fold-1:" not in again.out


def test_a_model_that_has_seen_the_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "rows.csv").write_text("text,label\n")
    settings = {"train_file": "rows.csv"}
    config = {
        "settings": settings,
        "data": {"labels": ["a"]},
        "identity": {},
        "launch": {"folder": str(tmp_path)},
    }
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    words = ["folds", ROOT / "recipes/cls.py", "--train_file", tmp_path / "rows.csv",
             "--model_name_or_path", tmp_path / "run" / "model"]  # fmt: skip
    parsed = build_parser().parse_known_args(list(map(str, words)))
    refusal(command.run, *parsed, says=["--model_name_or_path", "labels of these rows"])
