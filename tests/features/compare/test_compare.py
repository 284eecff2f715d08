"""`toolkit compare`: its statistics equal those of scipy and scikit-learn; incomparable runs are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, norm
from sklearn import metrics as sk

from tests.faults import refusal
from tests.report.made import SETTINGS, make_run, write_lines
from tests.report.test_html import Page
from tests.runs import edit_json, lines_of
from toolkit.cli import build_parser
from toolkit.data.labels import Labels
from toolkit.errors import UserError
from toolkit.features.compare.command import charts, write_page
from toolkit.features.compare.command import run as run_command
from toolkit.report import bootstrap
from toolkit.report.comparison import ComparedRun, as_text, compare, tables

NAMES = ("neg", "pos", "没有")
LABELS = Labels("single_label_classification", NAMES, ("label",))


def predictions(wrong: float, seed: int = 0, count: int = 400) -> list[dict[str, Any]]:
    """The truth is the same for every seed; a share `wrong` of the guesses is wrong."""
    truth = np.random.default_rng(99).integers(0, 3, count)
    generator = np.random.default_rng(seed)
    guess = np.where(generator.random(count) < wrong, (truth + generator.integers(1, 3, count)) % 3, truth)
    return [{"id": row, "label": NAMES[true], "prediction": NAMES[guess]}
            for row, (true, guess) in enumerate(zip(truth, guess, strict=True))]  # fmt: skip


def made(folder: Path, lines: list[dict[str, Any]], world: dict[str, Any] | None = None, **settings: Any) -> Path:
    truth, guess = ([line[key] for line in lines] for key in ("label", "prediction"))
    numbers = {"loss": 0.5, "accuracy": sk.accuracy_score(truth, guess),
               "f1_macro": sk.f1_score(truth, guess, labels=list(NAMES), average="macro")}  # fmt: skip
    make_run(folder, LABELS, lines, numbers, {**SETTINGS, "seed": 1, "output_dir": str(folder), **settings})
    if world:
        edit_json(folder / "config.json", world=world)
    (folder / "report.html").touch()
    return folder


def test_intervals_and_tests(tmp_path: Path) -> None:
    good, bad = predictions(0.1, 1), predictions(0.25, 2)
    comparison, runs = compare([made(tmp_path / "bad", bad, learning_rate=1.0), made(tmp_path / "好", good)])
    assert [run["name"] for run in comparison["runs"]] == ["好", "bad"]
    for run, lines in zip(comparison["runs"], (good, bad), strict=True):
        truth, guess = ([line[name] for line in lines] for name in ("label", "prediction"))
        accuracy, f1 = run["metrics"]["accuracy"], run["metrics"]["f1_macro"]
        assert accuracy["value"] == pytest.approx(sk.accuracy_score(truth, guess))
        assert f1["value"] == pytest.approx(sk.f1_score(truth, guess, average="macro"))
        half = norm.ppf(0.975) * (accuracy["value"] * (1 - accuracy["value"]) / 400) ** 0.5
        assert accuracy["high"] - accuracy["low"] == pytest.approx(2 * half, rel=0.15)
        assert f1["low"] < f1["value"] < f1["high"]
    first, second = (np.array([line["label"] == line["prediction"] for line in lines]) for lines in (good, bad))
    only = int((second & ~first).sum()), int((first & ~second).sum())
    assert comparison["runs"][1]["against_best"]["accuracy"]["p"] == binomtest(only[0], sum(only)).pvalue
    assert comparison["runs"][1]["against_best"]["f1_macro"]["p"] < 0.01
    assert comparison["settings"] == {"learning_rate": {"好": 5e-5, "bad": 1.0}}  # without output_dir
    lines = as_text(comparison).splitlines()
    assert any(line.startswith("bad against 好: clearly worse (accuracy -0.1") for line in lines)
    write_page(tmp_path / "compare.html", comparison, runs)
    page = Page(tmp_path / "compare.html")
    assert page.open == page.loads() == []
    assert [row[0] for row in page.rows["table1"]] == ["run", "好", "bad"]
    assert [tag for tag, _ in page.tags].count("svg") == 4


def test_equal_runs_have_no_clear_difference_and_their_losses_are_compared_by_step(tmp_path: Path) -> None:
    lines, alone = predictions(0.1), {"num_processes": 1, "distributed_type": "NO", "deepspeed": None,
                                      "mixed_precision": "bf16", "device": "A100"}  # fmt: skip
    folders = [made(tmp_path / "zero", lines, per_device_batch_size=4), made(tmp_path / "one", lines, alone)]
    steps = (tmp_path / "one" / "metrics.jsonl").read_text().replace('"loss": 0.5,', '"loss": 0.50001,')
    (tmp_path / "one" / "metrics.jsonl").write_text(steps)
    comparison, _ = compare(folders)
    assert {run["name"]: run["strategy"] for run in comparison["runs"]} == {"zero": "2 x ZeRO-2", "one": "one process"}
    assert comparison["runs"][1]["against_best"]["accuracy"] == {"difference": 0, "low": 0, "high": 0, "p": 1}
    assert max(comparison["strategies"].values()) == pytest.approx(2e-5, rel=1e-2)
    assert "largest loss difference" in as_text(comparison)
    assert comparison["runs"][0]["peak_memory_bytes"] == 2**30


def test_seeds_of_one_job_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    folders = [made(tmp_path / f"s{seed}", predictions(0.1, seed), seed=seed, data_seed=1) for seed in (1, 2, 3)]
    folders.append(made(tmp_path / "other", predictions(0.1, 4), seed=1, data_seed=1, learning_rate=1.0))
    comparison, _ = compare(folders)
    (group,) = comparison["seeds"]
    values = [run["metrics"]["accuracy"]["value"] for run in comparison["runs"] if run["name"] != "other"]
    assert sorted(group["runs"]) == ["s1", "s2", "s3"]
    assert group["metrics"]["accuracy"]["mean"] == pytest.approx(np.mean(values))
    assert group["metrics"]["accuracy"]["sd"] == pytest.approx(np.std(values, ddof=1))


def test_differently_defined_losses_are_not_compared(tmp_path: Path) -> None:
    lines = [predictions(0.1, seed) for seed in (1, 2, 3)]
    folders = [made(tmp_path / "plain", lines[0]), made(tmp_path / "explicit", lines[1], label_smoothing_factor=0.0),
               made(tmp_path / "weighted", lines[2], class_weights="balanced")]  # fmt: skip
    comparison, runs = compare(folders)
    assert comparison["other_loss"] == "class_weights"
    assert "loss" not in next(table for _, table in tables(comparison))[0]
    assert any("class_weights" in line for line in as_text(comparison).splitlines()[-3:])
    titles = [chart.title for chart in charts(comparison, runs)]
    for loss in ("Training loss", "Validation loss"):
        groups = {frozenset(title.split(": ")[1].split(", ")) for title in titles if title.startswith(loss)}
        assert groups == {frozenset({"plain", "explicit"}), frozenset({"weighted"})}
    assert len(titles) == 6
    drop = made(tmp_path / "drop", lines[1], r_drop_alpha=1.0)
    comparison, runs = compare([folders[0], drop])
    assert (comparison["other_loss"], len(charts(comparison, runs))) == ("", 5)  # only the training losses differ
    by_loss = [made(tmp_path / f"{name}-by-loss", lines[0], metric_for_best_model="loss", label_smoothing_factor=value)
               for name, value in (("a", 0.0), ("b", 0.0), ("c", 0.1))]  # fmt: skip
    assert "label_smoothing_factor" in compare(by_loss)[0]["left_out"]["c-by-loss"]


def test_incomparable_runs_are_left_out_by_name(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, predictions(0.1, seed)) for seed, name in enumerate(("a", "b"))]
    others = made(tmp_path / "rows", [{**line, "id": line["id"] + 1} for line in predictions(0.1)], seed=2)
    killed = made(tmp_path / "killed", predictions(0.1))
    (killed / "predictions.jsonl").write_text("")
    young = made(tmp_path / "young", predictions(0.1))
    (young / "eval.jsonl").unlink()
    labels = tmp_path / "labels"
    make_run(labels, Labels("regression", ("score",), ("score",)), [{"id": 0, "label": 1.0, "prediction": 2.0}],
             {"loss": 0.1, "mae": 1.0, "mse": 1.0})  # fmt: skip
    comparison, _ = compare([*runs, others, killed, young, labels])
    assert {run["name"] for run in comparison["runs"]} == {"a", "b"}
    for name, reason in (("rows", "pass the same --data_seed"), ("killed", "killed?"), ("young", "not evaluated yet"),
                         ("labels", "other labels than a")):  # fmt: skip
        assert reason in comparison["left_out"][name]
    assert any(line.startswith("left out: rows: ") for line in as_text(comparison).splitlines())
    with pytest.raises(UserError, match="these runs cannot be compared: rows: it was evaluated on other rows than a"):
        compare([runs[0], others])


def test_folders_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    run = made(tmp_path / "runs" / "a", predictions(0.1))
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    for folder, message in ((run.parent, f"did you mean {run}"), (run / "model", f"did you mean {run}"),
                         (tmp_path / "no", "no is not a run folder")):  # fmt: skip
        refusal(compare, [run, folder], match=message)


def test_the_command_on_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "a", predictions(0.1))
    run_command(build_parser().parse_args(["compare", str(folder), "--json"]))
    assert json.loads(capsys.readouterr().out)["runs"][0]["metrics"]["accuracy"]["value"] > 0.8
    run_command(build_parser().parse_args(["compare", str(folder), "--output", str(tmp_path / "c.html")]))
    assert "400 rows of validation" in capsys.readouterr().out
    assert (tmp_path / "c.html").is_file()


def test_rows_without_an_answer_count_as_in_the_evaluation(tmp_path: Path) -> None:
    lines = predictions(0.1)
    folder = made(tmp_path / "a", lines)
    for line in lines[:300]:
        line["probabilities"] = [0.5 if name == line["prediction"] else 0.25 for name in NAMES]
        line["prediction"] = None  # --abstain_below 0.6
    write_lines(folder / "predictions.jsonl", lines)
    (run,) = compare([folder])[0]["runs"]
    expected = ComparedRun(folder, "a").record.last.numbers["accuracy"]
    assert run["metrics"]["accuracy"]["value"] == pytest.approx(expected)


def test_scores_of_each_kind_of_prediction() -> None:
    several = [{"label": ["neg"], "prediction": ["neg", "pos"]}, {"label": [], "prediction": []}] * 50
    scores = bootstrap.scores_of(several, "multi_label_classification", NAMES)
    truth = np.array([[1, 0, 0], [0, 0, 0]] * 50)
    guess = np.array([[1, 1, 0], [0, 0, 0]] * 50)
    for name, value in scores.values.items():
        expected = sk.accuracy_score(truth, guess) if name == "accuracy" else sk.f1_score(
            truth, guess, average=name.removeprefix("f1_"), zero_division=0)  # fmt: skip
        assert value == pytest.approx(expected), name
    unanswered = bootstrap.scores_of(
        [{"label": "neg", "prediction": None}, {"label": "neg", "prediction": "neg"}], LABELS.problem_type, NAMES
    )
    assert unanswered.values == pytest.approx({"accuracy": 0.5, "f1_macro": 2 / 3 / 3})
    numbers = bootstrap.scores_of([{"label": [1.0, 2.0], "prediction": [2.0, 4.0]}], "regression", ("a", "b"))
    assert numbers.values == {"mae": 1.5, "mse": 2.5}
    assert bootstrap.intervals([numbers])[0][0]["mse"] == {"value": 2.5, "low": 2.5, "high": 2.5}  # a single row
    titles = bootstrap.scores_of([{"scores": {"rougeL": 0.25}}, {"scores": {"rougeL": 0.75}}], "title_generation", ())
    assert titles.values == {"rougeL": 0.5}
    ((values, differences),) = bootstrap.intervals([titles])
    assert values == {"rougeL": {"value": 0.5, "low": 0.25, "high": 0.75}}
    assert differences == {"rougeL": {"difference": 0.0, "low": 0.0, "high": 0.0}}


def test_the_permutation_test_of_accuracy_agrees_with_mcnemars() -> None:
    one, other = (predictions(wrong, seed) for seed, wrong in ((1, 0.2), (2, 0.24)))
    scores = [bootstrap.scores_of(lines, LABELS.problem_type, NAMES) for lines in (one, other)]
    exact = bootstrap.p_values(*scores)["accuracy"]
    permuted = bootstrap.p_values(*(score._replace(names=("a", "b")) for score in scores))["a"]
    assert 0.02 < exact < 0.9
    assert permuted == pytest.approx(exact, abs=0.05)
    zeros, single, triple = (
        bootstrap.scores_of([{"scores": {"x": value}} for value in values], "title_generation", ())
        for values in ([0.0] * 3, [1.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    )
    assert bootstrap.p_values(triple, zeros) == {"x": 2 / 2**3}  # 2 of the 8 ways to swap give as large a difference
    assert bootstrap.p_values(single, zeros) == bootstrap.p_values(zeros, zeros) == {"x": 1}


def test_an_unfinished_run_is_marked_and_a_nan_sorts_last(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", predictions(0.1))
    (folder / "report.html").unlink()
    data = json.loads((folder / "config.json").read_text())["data"]
    edit_json(folder / "config.json", data=data | {"total_steps": 80})
    other = made(tmp_path / "b", predictions(0.2))
    for run, value in ((folder, None), (other, 0.5)):  # a custom metric, NaN in one of them
        edit_json(run / "config.json", settings={**SETTINGS, "metric_for_best_model": "score"})
        write_lines(run / "eval.jsonl", [line | {"score": value} for line in lines_of(run / "eval.jsonl")])
    comparison, _ = compare([folder, other])
    assert [run["name"] for run in comparison["runs"]] == ["b", "a"]
    assert comparison["runs"][1]["unfinished"] == "step 40 of 80"
    assert ComparedRun(folder, "a").strategy == "2 x ZeRO-2"
