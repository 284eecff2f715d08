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
    guess = np.where(
        generator.random(count) < wrong, (truth + generator.integers(1, 3, count)) % 3, truth
    )
    return [{"id": row, "label": NAMES[true], "prediction": NAMES[guess]}
            for row, (true, guess) in enumerate(zip(truth, guess, strict=True))]  # fmt: skip


def made(
    folder: Path, lines: list[dict[str, Any]], world: dict[str, Any] | None = None, **settings: Any
) -> Path:
    truth, guess = ([line[key] for line in lines] for key in ("label", "prediction"))
    numbers = {"loss": 0.5, "accuracy": sk.accuracy_score(truth, guess),
               "f1_macro": sk.f1_score(truth, guess, labels=list(NAMES), average="macro")}  # fmt: skip
    make_run(
        folder,
        LABELS,
        lines,
        numbers,
        {**SETTINGS, "seed": 1, "output_dir": str(folder), **settings},
        metric_for_best_model=settings.get("metric_for_best_model", "f1_macro"),
    )
    if world:
        edit_json(folder / "config.json", world=world)
    (folder / "report.html").touch()
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
    assert difference["accuracy"]["value"] == pytest.approx(change.mean())
    assert difference["accuracy"]["low"] == pytest.approx(change.mean() - half, abs=0.01)
    assert difference["accuracy"]["high"] == pytest.approx(change.mean() + half, abs=0.01)
    same = statistics.intervals(statistics.differences(best, best))
    assert same["f1_macro"] == {"value": 0, "low": 0, "high": 0}
    rows = comparison.table
    columns = ["learning_rate", "f1_macro", "accuracy", "difference"]  # without output_dir
    assert list(rows) == columns
    assert list(rows["learning_rate"]) == ["5e-05", "1.0"]
    assert rows.loc["bad", "difference"].startswith(f"{difference['f1_macro']['value']:.4f} [-0.")
    assert rows.loc["好", "difference"] == ""
    assert rows.loc["bad", "difference"] in str(comparison)


def test_seeds_of_one_job_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    folders = [
        made(tmp_path / f"s{seed}", predictions(0.1, seed), seed=seed, data_seed=1)
        for seed in (1, 2, 3)
    ]
    other = made(tmp_path / "other", predictions(0.1, 4), seed=1, data_seed=1, learning_rate=1.0)
    comparison = compare([*folders, other])
    values = [run.intervals["accuracy"]["value"] for run in comparison.runs if run.name != "other"]
    *_, name = comparison.table.index
    assert len(comparison.table) == 5
    assert {"mean", "of", "s1", "s2", "s3"} == set(name.replace(",", "").split())
    spread = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    assert comparison.table.loc[name, "accuracy"] == spread


def test_differently_defined_losses_are_not_compared(tmp_path: Path) -> None:
    by_loss = [made(tmp_path / name, predictions(0.1), metric_for_best_model="loss", label_smoothing_factor=value)
               for name, value in (("a", 0.0), ("b", 0.0), ("c", 0.1))]  # fmt: skip
    assert compare(by_loss[:2]).metric == "loss"
    refusal(compare, by_loss, says=["label_smoothing_factor"])


def test_incomparable_runs_are_refused_by_name(tmp_path: Path) -> None:
    first = made(tmp_path / "first", predictions(0.1))
    others = made(tmp_path / "rows", [{**line, "id": line["id"] + 1} for line in predictions(0.1)])
    killed, young, file, same = (
        made(tmp_path / name, predictions(0.1)) for name in ("killed", "young", "file", "same")
    )
    data = json.loads((first / "config.json").read_text(encoding="utf-8"))["data"]
    for run, digest in ((first, "1-utf-8"), (same, "1-utf-8-quoting none"), (file, "2")):
        facts = {"file_digests": {"train": digest}, "metric_for_best_model": "accuracy"}
        edit_json(run / "config.json", data=data | facts)
    edit_json(others / "config.json", data=data | {"file_digests": {"train": "1-utf-8"}})
    (killed / "predictions.jsonl").write_text("")
    (young / "predictions.jsonl").unlink()
    numbers = tmp_path / "numbers"
    make_run(numbers, Labels("regression", ("score",), ("score",)), [{"id": 0, "label": 1.0, "prediction": 2.0}],
             {"loss": 0.1, "mae": 1.0, "mse": 1.0})  # fmt: skip
    assert compare([first, same]).metric == "accuracy"
    reasons = {
        others: "--data_seed",
        numbers: "other rows or labels than",
        killed: "resume",
        young: "resume",
        file: "the same file",
    }
    for run, reason in reasons.items():
        refusal(compare, [first, run], says=[reason, run.name])
    metrics = json.loads((same / "eval.jsonl").read_text().splitlines()[-1])
    del metrics["accuracy"]
    (same / "eval.jsonl").write_text(json.dumps(metrics))
    refusal(compare, [first, same], says=["no accuracy", "same"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = (
        made(tmp_path / "a", predictions(0.1)),
        made(tmp_path / "好", predictions(0.2), dropout=0.1),
    )
    file = tmp_path / "c.html"
    run_command(
        build_parser().parse_args(["compare", str(folder), str(other), "--output", str(file)])
    )
    assert "the best run by f1_macro first" in capsys.readouterr().out
    page = Page(file)
    assert page.loads() == []
    assert [row[0] for row in page.rows["table"]] == ["run", "a", "好"]
    assert [tag for tag, _ in page.tags].count("svg") == 1


def values_of(scores: statistics.Scores) -> dict[str, float]:
    return {name: numbers["value"] for name, numbers in statistics.intervals(scores).items()}


def test_scores_of_each_kind_of_prediction() -> None:
    several = [
        {"label": ["neg"], "prediction": ["neg", "pos"]},
        {"label": [], "prediction": []},
    ] * 50
    truth = np.array([[1, 0, 0], [0, 0, 0]] * 50)
    guess = np.array([[1, 1, 0], [0, 0, 0]] * 50)
    values = values_of(statistics.scores_of(several, "multi_label_classification", NAMES))
    f1 = {
        f"f1_{kind}": sk.f1_score(truth, guess, average=kind, zero_division=0)
        for kind in ("macro", "micro")
    }
    assert values == pytest.approx(f1 | {"accuracy": sk.accuracy_score(truth, guess)})
    unanswered = [{"label": "neg", "prediction": None}, {"label": "neg", "prediction": "neg"}]
    values = values_of(statistics.scores_of(unanswered, LABELS.problem_type, NAMES))
    assert values == pytest.approx({"accuracy": 0.5, "f1_macro": 2 / 3 / 3})
    numbers = statistics.scores_of(
        [{"label": [1.0, 2.0], "prediction": [2.0, 4.0]}], "regression", ("a", "b")
    )
    assert statistics.intervals(numbers) == {  # of a single row
        "mae": {"value": 1.5, "low": 1.5, "high": 1.5}, "mse": {"value": 2.5, "low": 2.5, "high": 2.5}
    }  # fmt: skip
    texts = [
        {"scores": {"x": right}, "weight": count}
        for right, count in ((0.25, 8), (0.0, 0), (1.0, 2))
    ]
    values = values_of(statistics.scores_of(texts, "masked_language_modeling", ()))
    assert values == pytest.approx({"x": 0.4})  # 4 of 10 tokens
    titles = statistics.scores_of(
        [{"scores": {"rougeL": 0.25}}, {"scores": {"rougeL": 0.75}}], "title_generation", ()
    )
    assert statistics.intervals(titles) == {"rougeL": {"value": 0.5, "low": 0.25, "high": 0.75}}
