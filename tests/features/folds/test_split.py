"""The rows of each fold, the next fold, and corrected labels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import refusal
from toolkit.config import TaskSettings, parse
from toolkit.data.prepare import Prepared
from toolkit.features.folds.split import fold_folder, next_fold, text_digest

Prepare = Callable[..., Prepared]
ROWS = [{"text": f"good film {place}", "label": ("a", "b", "c")[place % 3], "source": ("web", "shop")[place % 2],
         "row": str(place)} for place in range(31)]  # fmt: skip
ROWS[30] |= {"label": "rare"}


def done(folder: Path, fold: int) -> None:
    path = fold_folder(folder, fold)
    path.mkdir(parents=True)
    (path / "out_of_fold.jsonl").touch()


def test_every_row_is_validated_once(prepared: Prepare, tmp_path: Path) -> None:
    validated = []
    for fold in (1, 2, 3):
        data = prepared(ROWS, folds=3, output_dir=str(tmp_path), data_seed=5)
        assert data.feature_facts["fold"] == fold
        rows = data.validation.rows.tolist()
        assert sorted([*rows, *data.train.rows.tolist()]) == list(range(31))
        validated += rows
        counts = np.bincount(data.validation.labels, minlength=4)
        assert set(counts[:3]) <= {3, 4}  # stratified
        assert data.validation.group_cells()[0] == {"source": ROWS[rows[0]]["source"]}
        assert data.test is None
        done(tmp_path, fold)
    assert sorted(validated) == list(range(31))
    settings = {"folds": 3, "data_seed": 5, "output_dir": str(tmp_path)}
    refusal(prepared, ROWS, **settings, match="all 3 folds are done; `toolkit report")
    for changed in ({"folds": 4}, {"data_seed": 6}):
        refusal(prepared, ROWS, **settings | changed, match="has 3 folds of another command")


def test_duplicates_of_a_text_are_in_one_fold_and_move_no_other_text(
    prepared: Prepare, tmp_path: Path
) -> None:
    """With contradicting labels, too; fewer different texts than folds are an error."""
    repeated = [*ROWS, *(ROWS[place] | {"label": "a"} for place in (5, 5, 7))]
    for fold in (1, 2, 3):
        rows = [set(prepared(each, folds=3, output_dir=str(tmp_path / name)).validation.rows.tolist())
                for name, each in (("plain", ROWS), ("repeated", repeated))]  # fmt: skip
        assert rows[1] == rows[0] | ({31, 32} if 5 in rows[0] else set()) | (
            {33} if 7 in rows[0] else set()
        )
        done(tmp_path / "plain", fold)
        done(tmp_path / "repeated", fold)
    refusal(
        prepared,
        ROWS[:2] * 9,
        folds=3,
        output_dir=str(tmp_path / "few"),
        match="2 different texts are too few",
    )


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("teacher", "leave --teacher out"), ("model_name_or_path", "name the model that it was")],
)
def test_a_model_that_knows_the_labels_is_refused(
    setting: str, remedy: str, prepared: Prepare, tmp_path: Path
) -> None:
    settings = {
        "folds": 3,
        "output_dir": str(tmp_path / "folds"),
        setting: str(tmp_path / "run" / "model"),
    }
    (tmp_path / "run" / "model").mkdir(parents=True)
    run = {
        "data": {"labels": ["a", "b"]},
        "settings": {"train_file": str(tmp_path / "x" / ".." / "train_file.jsonl")},
    }
    (tmp_path / "run" / "config.json").write_text(json.dumps(run))
    refusal(prepared, ROWS, **settings, match=f"--{setting} .*run/model .*{remedy}")
    relative = run | {
        "settings": {"train_file": "train_file.jsonl"},
        "launch": {"folder": str(tmp_path)},
    }
    (tmp_path / "run" / "config.json").write_text(json.dumps(relative))
    refusal(prepared, ROWS, **settings, match=f"--{setting} .*run/model .*{remedy}")
    assert not (tmp_path / "folds").exists()
    other = run | {"settings": run["settings"] | {"label_column": "source"}}
    for trained in (other, run | {"data": {}}):  # other labels, or pretraining on these texts
        (tmp_path / "run" / "config.json").write_text(json.dumps(trained))
        assert prepared(ROWS, **settings).feature_facts["fold"] == 1


def test_max_train_samples_selects_the_same_rows_in_all_folds(
    prepared: Prepare, tmp_path: Path
) -> None:
    validated = []
    for fold in (1, 2):
        validated += prepared(
            ROWS, folds=2, output_dir=str(tmp_path), max_train_samples=20
        ).validation.rows.tolist()
        done(tmp_path, fold)
    assert len(validated) == len(set(validated)) == 20


def test_a_damaged_file_and_the_folder_of_another_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folds.json").write_text('{"folds": "five"}')
    refusal(
        next_fold,
        None,
        str(tmp_path),
        5,
        "x",
        match=r'folds\.json: folds is "five" and should be a number',
    )
    (tmp_path / "metrics.jsonl").touch()
    refusal(next_fold, None, str(tmp_path), 5, "x", match="has a run without --folds")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "--folds needs --output_dir"),
        (["--output_dir", "x", "--overwrite_output_dir"], "--overwrite_output_dir"),
        (
            ["--output_dir", "x", "--validation_file", "v.csv"],
            "--validation_file and --folds contradict",
        ),
        (["--output_dir", "x", "--calibrate"], "--calibrate and --folds contradict"),
        (["--output_dir", "x", "--push_to_hub"], "--push_to_hub and --folds contradict"),
    ],
)
def test_settings_that_contradict_folds(settings: list[str], message: str) -> None:
    words = ["--train_file", "t.csv", "--model_name_or_path", "m", "--folds", "5", *settings]
    refusal(parse, TaskSettings, words, match=message)


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def correction(row: int, label: Any, **more: Any) -> dict[str, Any]:
    return {"id": row, "text_digest": text_digest(str(ROWS[row]["text"])), "label": label, **more}


def test_corrections_change_labels_and_leave_rows_out(prepared: Prepare, tmp_path: Path) -> None:
    plain = prepared(ROWS)
    lines = [correction(0, "b"), correction(4, "b", given="b"), correction(7, None)]
    data = prepared(ROWS, label_corrections=write(tmp_path / "c.jsonl", *lines))
    assert data.digest != plain.digest
    labels = {}
    for split in (data.train, data.validation):
        labels |= dict(
            zip(
                split.rows.tolist(),
                [data.labels.names[label] for label in split.labels],
                strict=True,
            )
        )
    assert labels == {place: row["label"] for place, row in enumerate(ROWS) if place != 7} | {
        0: "b"
    }
    assert any("1 labels changed, 1 unchanged, 1 rows left out" in note for note in data.notes)
    again = prepared(
        ROWS, label_corrections=write(tmp_path / "d.jsonl", correction(0, "c"), *lines[1:])
    )
    assert again.digest != data.digest
    assert set(prepared(ROWS, validation_split=0.5).validation.groups()) == {
        "length",
        "source",
    }  # not `row`


def test_corrections_of_several_labels_and_of_pairs(prepared: Prepare, tmp_path: Path) -> None:
    rows = [
        {"text": f"film {row}", "second": "x", "label": ["a"] if row % 2 else ["a", "b"]}
        for row in range(20)
    ]
    line = {"id": 3, "text_digest": text_digest("film 3\nx"), "label": []}
    data = prepared(rows, text_pair="second", label_corrections=write(tmp_path / "c.jsonl", line))
    for split in (data.train, data.validation):
        for row, label in zip(split.rows, split.labels, strict=True):
            assert label.tolist() == ([0, 0] if row == 3 else [1, 1 - row % 2])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [correction(1, "b"), correction(2, "b") | {"text_digest": "0" * 16}],
            r"id 2 \(row 3 of .* has another text",
        ),
        (
            [correction(1, "d")],
            r"line 1: id 1 \(row 2 of .*'d' is no label.*the classes are a, b, c, rare",
        ),
        ([correction(1, ["a"])], "is no label"),
        ([correction(1, "b") | {"id": 99}], "row 100 of .* is not among the training rows"),
        ([correction(1, "b"), correction(1, "c")], "line 2: id 1 has two lines"),
        ([{"id": 1, "label": "b"}], 'line 1: write {"id": row from 0'),
        ([correction(1, 3)], "line 1: write"),
        ([correction(1, "b") | {"id": True}], "line 1: write"),
    ],
)
def test_corrections_that_do_not_fit(
    lines: list[Any], message: str, prepared: Prepare, tmp_path: Path
) -> None:
    refusal(prepared, ROWS, label_corrections=write(tmp_path / "c.jsonl", *lines), match=message)
