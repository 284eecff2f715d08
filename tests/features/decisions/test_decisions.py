"""Tuned decisions: equal under every launch, saved with the model, applied by all that loads it; thresholds,
temperature and abstention against brute force and by hand."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import toolkit
from tests import inputs
from tests.faults import refusal
from tests.matrix import TINY, runs, words_of
from tests.runs import assert_same_run, lines_of, start, train
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.outputs import Evaluation
from toolkit.features.decisions.calibration import calibration_error, fit_temperature
from toolkit.features.decisions.decisions import Decisions, saved_decisions
from toolkit.features.decisions.feature import DecisionSettings
from toolkit.features.decisions.tune import best_threshold, check, tune


@inputs.made_once("rows.csv")
def half(folder: Path, name: str) -> None:
    table = pd.read_csv(inputs.reviews())
    rows = table[:70] if name == "train" else table[70:]
    rows.to_csv(folder / "rows.csv", index=False)


COMMON = [*TINY, "--max_steps", 8, "--eval_every", 2, "--checkpoint_every", 4, "--learning_rate", "1e-2",
          "--data_seed", 3,
          "--global_batch_size", 20, "--per_device_batch_size", 6, "--metric_for_best_model", "loss"]  # fmt: skip
PLAIN = [*COMMON, "--train_file", partial(half, "train"), "--test_file", partial(half, "test")]
SETTINGS = "--positive_class neg --calibrate --abstain_below 0.55 --tune_thresholds".split()
TUNED = ["--calibrate", "--tune_thresholds", "f1"]
JOBS = {
    "plain": PLAIN,
    "two": [*PLAIN, *SETTINGS, "precision_at_recall=0.9"],
    "several": [*COMMON, "--train_file", partial(inputs.labelled, "multi-label", "train"), *TUNED],
}


def run_of(way: str, name: str) -> Path:
    return runs(way).run(f"decisions {name}", "recipes.cls", JOBS[name])


def saved(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "model" / "decisions.json").read_text()))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["two", "several"])
def test_the_same_under_every_launch(name: str) -> None:
    one, two = run_of("single", name), run_of("ddp x2", name)
    mine, theirs = saved(two), saved(one)
    assert theirs["temperature"] != 1
    assert mine["temperature"] == pytest.approx(theirs["temperature"], rel=1e-3)
    assert mine["thresholds"] == pytest.approx(theirs["thresholds"], abs=1e-4)
    assert mine["step"] == theirs["step"]
    assert_same_run(two, one)


def test_the_test_rows_are_evaluated_with_and_without_decisions() -> None:
    run, plain = run_of("single", "two"), run_of("single", "plain")
    last, without = (lines_of(folder / "eval.jsonl")[-1] for folder in (run, plain))
    assert (last["split"], last["num_samples"]) == ("test", 141)
    assert "decisions" not in without
    effect = last["decisions"]
    before = effect["before"]
    assert last["loss"] == without["loss"]
    assert before.items() - {("ece", before["ece"])} <= without.items()
    assert last.items() >= effect["after"].items() - {("ece", effect["after"]["ece"])}
    lines, names = lines_of(run / "predictions.jsonl"), ("neg", "pos")
    chances = np.array([line["probabilities"] for line in lines])
    guess = np.where(chances[:, 0] > effect["thresholds"]["neg"], 0, 1)
    correct = np.array([names[c] == line["label"] for c, line in zip(guess, lines, strict=True)])
    assert last["accuracy"] == pytest.approx(correct.mean())
    sure = chances[np.arange(141), guess] >= 0.55
    assert 0 < effect["answered"] == sure.sum() < 141
    assert effect["accuracy_of_answered"] == pytest.approx(correct[sure].mean())


def test_all_that_loads_the_model_applies_decisions(tmp_path: Path, no_launcher: None) -> None:
    run, file, out = run_of("single", "two"), half("test"), tmp_path / "out.csv"
    expected = [line["prediction"] for line in lines_of(run / "predictions.jsonl")]
    rows = pd.read_csv(file)
    assert None in expected
    start(["toolkit", "predict", run / "model", file, "--output", out]).succeeded()
    written = pd.read_csv(out)["prediction"]
    assert [None if pd.isna(cell) else cell for cell in written] == expected
    assert [line["prediction"] for line in toolkit.predict(run / "model", rows["text"])] == expected
    numbers = toolkit.evaluate(run / "model", rows["text"], rows["label"])
    assert numbers["accuracy"] == pytest.approx(lines_of(run / "eval.jsonl")[-1]["accuracy"])
    # they were tuned on the weights in model/; a checkpoint has none
    for source, has_file in (("checkpoints/best", False), ("model", True)):
        toolkit.convert(run / source, tmp_path / source)
        assert (tmp_path / source / "decisions.json").is_file() is has_file


def test_a_finished_run_is_tuned_again_with_other_settings(tmp_path: Path) -> None:
    """Its pages and the comparison with baselines are of the new answers."""
    run = tmp_path / "run"
    train(*words_of(JOBS["two"]), "--output_dir", run)
    before, weights = saved(run), (run / "model" / "model.safetensors").read_bytes()
    more = [*SETTINGS, "precision_at_recall=0.1"]
    printed = train(*words_of(PLAIN), *more, "--output_dir", run, pages=True)
    assert "decisions, on test: accuracy" in printed
    assert saved(run)["thresholds"] != before["thresholds"]
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    last = lines_of(run / "eval.jsonl")[-1]
    models = json.loads((run / "baselines.json").read_text())["models"]
    assert models["this model"]["accuracy"]["value"] == pytest.approx(last["accuracy"])
    answered = f"{last['decisions']['answered']} of 141"
    for page in ("report.html", "model/README.md"):
        assert answered in " ".join((run / page).read_text().split())
    train(*words_of(PLAIN), "--output_dir", run)
    assert not (run / "model" / "decisions.json").exists()
    assert None not in [line["prediction"] for line in lines_of(run / "predictions.jsonl")]


TWO = Labels("single_label_classification", ("neg", "pos"), ("label",))
THREE = Labels("single_label_classification", ("a", "b", "c"), ("label",))
SEVERAL = Labels("multi_label_classification", ("x", "y", "z"), ("label",))
NUMBER = Labels("regression", ("score",), ("score",))


def value(criterion: str, truth: np.ndarray, guess: np.ndarray) -> float:
    hits, alarms, misses = (truth & guess).sum(), (~truth & guess).sum(), (truth & ~guess).sum()
    if criterion == "f1":
        return float(2 * hits / (2 * hits + alarms + misses))
    enough = hits / truth.sum() >= float(criterion.partition("=")[2])
    return float(hits / max(hits + alarms, 1)) if enough else -1.0


@pytest.mark.parametrize("criterion", ["f1", "precision_at_recall=0.9", "precision_at_recall=1"])
def test_no_threshold_is_better(criterion: str) -> None:
    generator = np.random.default_rng(3)
    truth = generator.random(200) < 0.3
    scores = generator.normal(0.3 + 0.3 * truth, 0.2)
    chances = np.round(np.clip(scores, 0.01, 0.99), 2)  # with many ties
    tuned = best_threshold(truth, chances, criterion)
    thresholds = np.arange(-0.005, 1, 0.01)
    best = max(value(criterion, truth, chances > threshold) for threshold in thresholds)
    assert value(criterion, truth, chances > tuned) == best
    assert value(criterion, truth, chances > 0.5) < best
    assert best_threshold(np.zeros(9, bool), np.linspace(0.1, 0.9, 9), criterion) == 0.5


def test_a_fitted_temperature_is_the_one_applied_and_lowers_the_error() -> None:
    """With several labels, answers follow the threshold of each."""
    generator = np.random.default_rng(4)
    scores = generator.normal(0, 1.5, (4000, 3))
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    one = np.array([generator.choice(3, p=row) for row in chances])
    several = (generator.random(scores.shape) < 1 / (1 + np.exp(-scores))).astype(np.float32)
    logits = (3 * scores).astype(np.float32)
    for labels, truth in ((THREE, one), (SEVERAL, several)):
        assert fit_temperature(logits, truth) == pytest.approx(3, rel=0.05)
        before = calibration_error(Decisions(labels).probabilities(logits), truth)
        after = calibration_error(Decisions(labels, 3.0).probabilities(logits), truth)
        assert after["ece"] < 0.03 < 0.1 < before["ece"]
    assert fit_temperature(2 * np.eye(2), np.array([0, 1])) == 1  # without mistakes
    answers = Decisions(SEVERAL, 3.0, {"x": 0.9, "z": 0.1}).answers(logits)
    above = 1 / (1 + np.exp(-scores)) > np.array([0.9, 0.5, 0.1])
    expected = [[name for name, has in zip("xyz", row, strict=True) if has] for row in above]
    assert [line["prediction"] for line in answers] == expected


def test_the_error_of_a_few_probabilities_by_hand() -> None:
    chances = np.array([[0.9, 0.1], [0.2, 0.8], [0.84, 0.16]])
    error = calibration_error(chances, np.array([0, 0, 0]))
    # 0.8 and 0.84 share a bin of 1/15
    assert error["ece"] == pytest.approx((0.1 + abs(0.8 + 0.84 - 1)) / 3)


def test_a_threshold_from_few_rows_is_a_warning() -> None:
    rows = np.arange(40)
    logits = np.stack([np.zeros(40), np.linspace(2, -2, 40)], axis=1, dtype=np.float32)
    for positives, warns in ((9, True), (10, False), (30, False), (31, True)):
        truth = (rows < positives).astype(np.int64)
        split = Split("validation", Path(), np.zeros(0, np.int32), rows, truth, rows)
        evaluation = Evaluation("validation", {}, None, (split, logits))
        decisions, notes = tune(DecisionSettings(tune_thresholds="f1"), TWO, evaluation)
        assert ["threshold of pos" in line for line in notes] == [True] * warns
        assert set(decisions.thresholds) == {"pos"}


def test_the_file_of_a_model_is_read(tmp_path: Path) -> None:
    """Or refused, where it is damaged: answers would be nan, or of other labels."""

    def read(**changed: Any) -> Decisions | None:
        content = {"labels": ["neg", "pos"], "temperature": 2.0, "thresholds": {"pos": 0.3}}
        (tmp_path / "decisions.json").write_text(json.dumps(content | changed))
        return saved_decisions(str(tmp_path), TWO)

    assert saved_decisions(str(tmp_path), TWO) is None
    assert saved_decisions("no-such/model-anywhere", TWO) is None  # of the hub, out of reach
    assert read(abstain_below=0.75) == Decisions(TWO, 2.0, {"pos": 0.3}, 0.75)
    for message, changed in {
        "temperature": {"temperature": 1e-300},
        "thresholds": {"thresholds": {"pos": 1.5}},
        "unknown labels: good": {"thresholds": {"good": 0.5}},
        "for bad, good, not neg, pos": {"labels": ["bad", "good"]},
        "abstain_below": {"abstain_below": True},
    }.items():
        refusal(read, **changed, says=["decisions.json", message])


def test_settings_that_do_not_fit_the_labels() -> None:
    tuned = {"tune_thresholds": "f1"}
    for labels, settings, message in (
        (THREE, tuned, "3 labels"),
        (NUMBER, tuned, "regression"),
        (TWO, {**tuned, "positive_class": "poss"}, "did you mean pos"),
        (SEVERAL, {**tuned, "positive_class": "x"}, "name one of two classes"),
        (NUMBER, {"calibrate": True}, "regression"),
        (SEVERAL, {"abstain_below": 0.7}, "multi_label"),
    ):
        says = [list(settings)[-1], message]
        refusal(check, DecisionSettings(**settings), labels, says=says)
