"""`toolkit compare`: its statistics equal those of scipy and scikit-learn; incomparable runs are left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from sklearn import metrics as sk

from tests.faults import refusal
from tests.report.made import SETTINGS, make_run
from tests.report.test_html import Page
from tests.runs import edit_json
from toolkit.cli import build_parser
from toolkit.data.labels import Labels
from toolkit.features.compare.command import run as run_command
from toolkit.report import statistics
from toolkit.report.comparison import compare

NAMES = ("neg", "pos", "没有")
LABELS = Labels("single_label_classification", NAMES, ("label",))


def predictions(wrong: float, seed: int = 0, count: int = 400) -> list[dict[str, Any]]:
    """The truth is the same for every seed; a share `wrong` of the guesses is wrong."""
    truth = np.random.default_rng(99).integers(0, 3, count)
    generator = np.random.default_rng(seed)
    is_wrong = generator.random(count) < wrong
    guess = np.where(is_wrong, (truth + generator.integers(1, 3, count)) % 3, truth)
    return [{"id": row, "label": NAMES[true], "prediction": NAMES[guess]}
            for row, (true, guess) in enumerate(zip(truth, guess, strict=True))]  # fmt: skip


def made(folder: Path, lines: list[dict[str, Any]], **settings: Any) -> Path:
    truth, guess = ([line[key] for line in lines] for key in ("label", "prediction"))
    numbers = {"loss": 0.5, "accuracy": sk.accuracy_score(truth, guess),
               "f1_macro": sk.f1_score(truth, guess, labels=list(NAMES), average="macro")}  # fmt: skip
    metric = settings.get("metric_for_best_model", "f1_macro")
    settings = {**SETTINGS, "seed": 1, "output_dir": str(folder), **settings}
    make_run(folder, LABELS, lines, numbers, settings, metric_for_best_model=metric)
    return folder


def test_intervals_and_the_difference_from_the_best_run(tmp_path: Path) -> None:
    good, bad = predictions(0.1, 1), predictions(0.25, 2)
    folders = [made(tmp_path / "bad", bad, learning_rate=1.0), made(tmp_path / "好", good)]
    comparison = compare(folders)
    assert [run.name for run in comparison.runs] == ["好", "bad"]
    right = []
    for run, lines in zip(comparison.runs, (good, bad), strict=True):
        truth, guess = ([line[name] for line in lines] for name in ("label", "prediction"))
        accuracy, f1 = run.intervals["accuracy"], run.intervals["f1_macro"]
        assert accuracy["value"] == pytest.approx(sk.accuracy_score(truth, guess))
        assert f1["value"] == pytest.approx(sk.f1_score(truth, guess, average="macro"))
        assert f1["low"] < f1["value"] < f1["high"]
        right.append(np.equal(truth, guess).astype(float))
        half = norm.ppf(0.975) * right[-1].std() / 20
        assert accuracy["high"] - accuracy["low"] == pytest.approx(2 * half, rel=0.15)
    best, other = (run.scores for run in comparison.runs)
    difference = statistics.intervals(statistics.differences(other, best))
    change = right[1] - right[0]
    half = norm.ppf(0.975) * change.std() / 20
    for name, expected in (("value", 0), ("low", -half), ("high", half)):
        assert difference["accuracy"][name] == pytest.approx(change.mean() + expected, abs=0.01)
    rows = comparison.table
    assert list(rows) == ["learning_rate", "f1_macro", "accuracy", "difference"]  # no output_dir
    assert list(rows["learning_rate"]) == ["5e-05", "1.0"]
    assert rows.loc["bad", "difference"].startswith(f"{difference['f1_macro']['value']:.4f} [-0.")
    assert rows.loc["好", "difference"] == ""
    assert rows.loc["bad", "difference"] in str(comparison)


def test_seeds_of_one_job_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    folders = [made(tmp_path / f"s{seed}", predictions(0.1, seed), seed=seed) for seed in (1, 2, 3)]
    other = made(tmp_path / "other", predictions(0.1, 4), learning_rate=1.0)
    comparison = compare([*folders, other])
    values = [run.intervals["accuracy"]["value"] for run in comparison.runs if run.name != "other"]
    *_, name = comparison.table.index
    assert len(comparison.table) == 5
    assert {"mean", "of", "s1", "s2", "s3"} == set(name.replace(",", "").split())
    spread = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    assert comparison.table.loc[name, "accuracy"] == spread


def test_differently_defined_losses_are_not_compared(tmp_path: Path) -> None:
    folders = []
    for name, value in (("a", 0.0), ("b", 0.0), ("c", 0.1)):
        settings = {"metric_for_best_model": "loss", "label_smoothing_factor": value}
        folders.append(made(tmp_path / name, predictions(0.1), **settings))
    assert compare(folders[:2]).metric == "loss"
    refusal(compare, folders, says=["label_smoothing_factor"])


def test_incomparable_runs_are_refused_by_name(tmp_path: Path) -> None:
    lines = predictions(0.1)
    others = made(tmp_path / "rows", [{**line, "id": line["id"] + 1} for line in lines])
    first, killed, file, same = (made(tmp_path / name, lines) for name in ("1", "2", "3", "4"))
    data = json.loads((first / "config.json").read_text(encoding="utf-8"))["data"]
    quoted = "1-utf-8-quoting none"
    for run, digest in {first: "1-utf-8", same: quoted, file: "2", others: "1-utf-8"}.items():
        facts = {"file_digests": {"train": digest}, "metric_for_best_model": "accuracy"}
        edit_json(run / "config.json", data=data | facts)
    (killed / "predictions.jsonl").unlink()
    numbers, score = tmp_path / "numbers", Labels("regression", ("score",), ("score",))
    row = {"id": 0, "label": 1.0, "prediction": 2.0}
    make_run(numbers, score, [row], {"loss": 0.1, "mae": 1.0})
    assert compare([first, same]).metric == "accuracy"
    for run, reason in {
        others: "--data_seed", numbers: "other rows or labels than", killed: "resume",
        file: "the same file",
    }.items():  # fmt: skip
        refusal(compare, [first, run], says=[reason, run.name])
    metrics = json.loads((same / "eval.jsonl").read_text().splitlines()[-1])
    del metrics["accuracy"]
    (same / "eval.jsonl").write_text(json.dumps(metrics))
    refusal(compare, [first, same], says=["no accuracy", same.name])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = made(tmp_path / "a", predictions(0.1))
    other = made(tmp_path / "好", predictions(0.2), dropout=0.1)
    words = ["compare", best, other, "--output", tmp_path / "c.html"]
    run_command(build_parser().parse_args(list(map(str, words))))
    assert "the best run by f1_macro first" in capsys.readouterr().out
    page = Page(tmp_path / "c.html")
    assert page.loads() == []
    assert [row[0] for row in page.rows["table"]] == ["run", "a", "好"]
    assert [tag for tag, _ in page.tags].count("svg") == 1


def values_of(lines: list[dict[str, Any]], kind: Any, names: Any = ()) -> dict[str, float]:
    scores = statistics.intervals(statistics.scores_of(lines, kind, names))
    return {name: numbers["value"] for name, numbers in scores.items()}


def test_scores_of_each_kind_of_prediction() -> None:
    """Those of masked tokens: tests/features/pretraining/test_pretraining.py."""
    lines = [{"label": ["neg"], "prediction": ["neg", "pos"]}, {"label": [], "prediction": []}]
    truth, guess = np.array([[1, 0, 0], [0, 0, 0]]), np.array([[1, 1, 0], [0, 0, 0]])
    expected = {f"f1_{kind}": sk.f1_score(truth, guess, average=kind, zero_division=0)
                for kind in ("macro", "micro")}  # fmt: skip
    expected["accuracy"] = sk.accuracy_score(truth, guess)
    values = values_of(50 * lines, "multi_label_classification", NAMES)
    assert values == pytest.approx(expected)
    lines = [{"label": "neg", "prediction": None}, {"label": "neg", "prediction": "neg"}]
    values = values_of(lines, LABELS.problem_type, NAMES)
    assert values == pytest.approx({"accuracy": 0.5, "f1_macro": 2 / 3 / 3})
    lines = [{"label": [1.0, 2.0], "prediction": [2.0, 4.0]}]
    assert values_of(lines, "regression", ("a", "b")) == {"mae": 1.5, "mse": 2.5}
    lines = [{"scores": {"rougeL": score}} for score in (0.25, 0.75)]
    assert values_of(lines, "title_generation") == {"rougeL": 0.5}
