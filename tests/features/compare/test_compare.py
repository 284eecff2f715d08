"""`toolkit compare`: its statistics equal those of scipy and scikit-learn; incomparable runs are
refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, norm
from sklearn import metrics as sk

from tests.faults import refusal
from tests.report.made import SETTINGS, make_run
from tests.report.test_html import Page
from tests.runs import edit_json
from toolkit.cli import build_parser
from toolkit.data.labels import MULTI, SINGLE, Labels
from toolkit.features.compare.command import run as run_command
from toolkit.report import statistics
from toolkit.report.comparison import as_text, compare, table

NAMES = ("neg", "pos", "没有")
LABELS = Labels(SINGLE, NAMES, ("label",))


def predictions(wrong: float, seed: int = 0, first: int = 0) -> list[dict[str, Any]]:
    """The truth is the same for every seed; a share `wrong` of the guesses is wrong."""
    truth = np.random.default_rng(99).integers(0, 3, 400)
    generator = np.random.default_rng(seed)
    other = (truth + generator.integers(1, 3, 400)) % 3
    guess = np.where(generator.random(400) < wrong, other, truth)
    lines = []
    for row, (true, guessed) in enumerate(zip(truth, guess, strict=True), first):
        lines.append({"id": row, "label": NAMES[true], "prediction": NAMES[guessed]})
    return lines


def made(folder: Path, lines: list[dict[str, Any]], **settings: Any) -> Path:
    truth, guess = ([line[key] for line in lines] for key in ("label", "prediction"))
    numbers = {"loss": 0.5, "accuracy": sk.accuracy_score(truth, guess)}
    numbers["f1_macro"] = sk.f1_score(truth, guess, average="macro")
    metric = settings.get("metric_for_best_model")
    settings = {**SETTINGS, "seed": 1, "output_dir": str(folder), **settings}
    make_run(folder, LABELS, lines, numbers, settings, metric_for_best_model=metric)
    return folder


def test_intervals_and_tests(tmp_path: Path) -> None:
    good, bad = predictions(0.1, 1), predictions(0.25, 2)
    folders = [made(tmp_path / "bad", bad, learning_rate=1.0), made(tmp_path / "好", good)]
    comparison, _ = compare(folders)
    assert [run["name"] for run in comparison["runs"]] == ["好", "bad"]
    for run, lines in zip(comparison["runs"], (good, bad), strict=True):
        truth, guess = ([line[name] for line in lines] for name in ("label", "prediction"))
        accuracy, f1 = run["metrics"]["accuracy"], run["metrics"]["f1_macro"]
        assert accuracy["value"] == pytest.approx(sk.accuracy_score(truth, guess))
        assert f1["value"] == pytest.approx(sk.f1_score(truth, guess, average="macro"))
        half = norm.ppf(0.975) * (accuracy["value"] * (1 - accuracy["value"]) / 400) ** 0.5
        assert accuracy["high"] - accuracy["low"] == pytest.approx(2 * half, rel=0.15)
        assert f1["low"] < f1["value"] < f1["high"]
    assert comparison["runs"][1]["metrics"]["f1_macro"]["p"] < 0.01
    # without output_dir
    assert comparison["settings"] == {"learning_rate": {"好": 5e-5, "bad": 1.0}}
    assert " p 0.001" in as_text(comparison)


def test_seeds_of_one_job_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    folders = []
    for seed in (1, 2, 3):
        lines = predictions(0.1, seed)
        folders.append(made(tmp_path / f"s{seed}", lines, seed=seed, data_seed=1))
    other = made(tmp_path / "other", predictions(0.1, 4), data_seed=1, learning_rate=1.0)
    comparison, _ = compare([*folders, other])
    (group,) = comparison["seeds"]
    assert sorted(group["runs"]) == ["s1", "s2", "s3"]
    runs = [run for run in comparison["runs"] if run["name"] != "other"]
    values = [run["metrics"]["accuracy"]["value"] for run in runs]
    assert group["metrics"]["accuracy"]["mean"] == pytest.approx(np.mean(values))
    assert group["metrics"]["accuracy"]["std"] == pytest.approx(np.std(values, ddof=1))
    assert len(table(comparison)) == 5


def test_incomparable_runs_are_refused_by_name(tmp_path: Path) -> None:
    first = made(tmp_path / "first", predictions(0.1))
    names = ("same", "file", "killed")
    same, file, killed = (made(tmp_path / name, predictions(0.1)) for name in names)
    others = made(tmp_path / "others", predictions(0.1, first=1))
    data = json.loads((first / "config.json").read_text(encoding="utf-8"))["data"]
    # the second is read in another way
    digests = {first: "1-utf-8", same: "1-utf-8-quoting none", others: "1-utf-8", file: "2"}
    for run, digest in digests.items():
        facts = {"file_digests": {"train": digest}, "metric_for_best_model": "accuracy"}
        edit_json(run / "config.json", data=data | facts)
    (killed / "predictions.jsonl").write_text("")
    assert compare([first, same])[0]["metric"] == "accuracy"
    for run, reason in ((others, "--data_seed"), (killed, "resume"), (file, "the same file")):
        refusal(compare, [first, run], says=[reason, run.name])
    metrics = json.loads((same / "eval.jsonl").read_text().splitlines()[-1])
    del metrics["accuracy"]
    (same / "eval.jsonl").write_text(json.dumps(metrics))
    refusal(compare, [first, same], says=["no accuracy", "same"])
    by_loss = []
    for name, smoothing in (("a", 0.0), ("b", 0.0), ("c", 0.1)):
        more = {"metric_for_best_model": "loss", "label_smoothing_factor": smoothing}
        by_loss.append(made(tmp_path / name, predictions(0.1), **more))
    assert compare(by_loss[:2])[0]["metric"] == "loss"
    refusal(compare, by_loss, says=["label_smoothing_factor"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(made(tmp_path / name, predictions(0.1))) for name in ("a", "好")]
    run_command(build_parser().parse_args(["compare", runs[0], "--json"]))
    assert json.loads(capsys.readouterr().out)["runs"][0]["metrics"]["accuracy"]["value"] > 0.8
    file = str(tmp_path / "c.html")
    run_command(build_parser().parse_args(["compare", *runs, "--output", file]))
    page = Page(Path(file))
    assert page.loads() == []
    assert [row[0] for row in page.rows["table"]] == ["run", "a", "好"]
    assert [tag for tag, _ in page.tags].count("svg") == 1


def values_of(lines: list[dict[str, Any]], problem_type: str) -> dict[str, float]:
    scores = statistics.scores_of(lines, problem_type, NAMES)
    return {name: numbers["value"] for name, numbers in statistics.intervals(scores).items()}


def test_scores_of_each_kind_of_prediction() -> None:
    lines: list[dict[str, Any]] = [
        {"label": ["neg"], "prediction": ["neg", "pos"]},
        {"label": [], "prediction": []},
    ]
    truth, guess = np.array([[1, 0, 0], [0, 0, 0]] * 50), np.array([[1, 1, 0], [0, 0, 0]] * 50)
    expected = {"accuracy": 0.5}
    for kind in ("macro", "micro"):
        expected[f"f1_{kind}"] = sk.f1_score(truth, guess, average=kind, zero_division=0)
    assert values_of(lines * 50, MULTI) == pytest.approx(expected)
    unanswered = [{"label": "neg", "prediction": None}, {"label": "neg", "prediction": "neg"}]
    assert values_of(unanswered, SINGLE) == pytest.approx({"accuracy": 0.5, "f1_macro": 2 / 9})
    numbers = [{"label": [1.0, 2.0], "prediction": [2.0, 4.0]}]
    assert values_of(numbers, "regression") == {"mae": 1.5, "mse": 2.5}
    texts = [{"scores": {"x": right}, "weight": count} for right, count in ((0.25, 8), (1.0, 2))]
    # 4 of 10 tokens
    assert values_of(texts, "masked_language_modeling") == pytest.approx({"x": 0.4})


def test_the_permutation_test_agrees_with_mcnemars() -> None:
    scores, right = [], []
    for seed, wrong in ((1, 0.2), (2, 0.24)):
        lines = predictions(wrong, seed)
        scores.append(statistics.scores_of(lines, SINGLE, NAMES))
        right.append(np.array([line["label"] == line["prediction"] for line in lines]))
    only = [int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())]
    expected = binomtest(only[0], sum(only)).pvalue
    assert 0.02 < expected < 0.9
    assert statistics.p_values(*scores)["accuracy"] == pytest.approx(expected, abs=0.04)
    zeros, single, triple = (
        statistics.scores_of([{"scores": {"x": value}} for value in values], "title_generation", ())
        for values in ([0.0] * 3, [1.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    )
    # 2 of the 8 ways to swap give as large a difference
    assert statistics.p_values(triple, zeros)["x"] == pytest.approx(2 / 2**3, abs=0.03)
    assert statistics.p_values(single, zeros) == statistics.p_values(zeros, zeros) == {"x": 1}
