"""Thresholds, temperature and abstention against brute force and by hand; reading decisions.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import refusal
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.outputs import Evaluation
from toolkit.features.decisions.calibration import calibration_error, fit_temperature
from toolkit.features.decisions.decisions import Decisions, saved_decisions
from toolkit.features.decisions.feature import DecisionSettings
from toolkit.features.decisions.tune import best_threshold, check, tune

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


def test_the_error_of_a_few_probabilities_by_hand() -> None:
    error = calibration_error(np.array([[0.9, 0.1], [0.2, 0.8], [0.84, 0.16]]), np.array([0, 0, 0]))
    # 0.8 and 0.84 share a bin of 1/15
    assert error["ece"] == pytest.approx((0.1 + abs(0.8 + 0.84 - 1)) / 3)


def tune_on(truth: np.ndarray, logits: np.ndarray, **settings: Any) -> tuple[Decisions, list[str]]:
    rows = np.arange(len(truth))
    split = Split("validation", Path(), np.zeros(0, np.int32), rows, truth, rows)
    evaluation = Evaluation("validation", {}, None, (split, logits.astype(np.float32)))
    return tune(DecisionSettings(**settings), TWO, evaluation)


def test_without_mistakes_there_is_nothing_to_calibrate_on() -> None:
    logits = np.array([[2, 0], [0, 2]] * 20)
    assert tune_on(np.array([0, 1] * 20), logits, calibrate=True)[0].temperature == 1


@pytest.mark.parametrize(("positives", "warns"), [(9, True), (10, False), (30, False), (31, True)])
def test_a_threshold_from_few_rows_is_a_warning(positives: int, warns: bool) -> None:
    truth = (np.arange(40) < positives).astype(np.int64)
    logits = np.stack([np.zeros(40), np.linspace(2, -2, 40)], axis=1)
    decisions, notes = tune_on(truth, logits, tune_thresholds="f1")
    assert ["threshold of pos" in line for line in notes] == [True] * warns
    assert set(decisions.thresholds) == {"pos"}


def test_answers_follow_the_thresholds() -> None:
    logits = np.random.default_rng(5).normal(0, 2, (500, 2)).astype(np.float32)
    decisions = Decisions(TWO, 1.7, {"pos": 0.3}, 0.6)
    answers = [line["prediction"] for line in decisions.answers(logits)]
    for answer, (neg, pos) in zip(answers, decisions.probabilities(logits), strict=True):
        name, chance = ("pos", pos) if pos > 0.3 else ("neg", neg)
        assert answer == (name if chance >= 0.6 else None)
    logits = np.random.default_rng(6).normal(0, 2, (500, 3)).astype(np.float32)
    decisions = Decisions(SEVERAL, 0.8, {"x": 0.9, "z": 0.1})
    answers = [line["prediction"] for line in decisions.answers(logits)]
    for answer, chances in zip(answers, decisions.probabilities(logits), strict=True):
        above = chances > np.array([0.9, 0.5, 0.1])
        assert answer == [name for name, is_above in zip("xyz", above, strict=True) if is_above]


def written(folder: Path, **changed: Any) -> str:
    content = {"labels": ["neg", "pos"], "temperature": 2.0, "thresholds": {"pos": 0.3}}
    (folder / "decisions.json").write_text(json.dumps(content | changed))
    return str(folder)


def test_the_file_of_a_model_is_read(tmp_path: Path) -> None:
    assert saved_decisions(str(tmp_path), TWO) is None
    assert saved_decisions(written(tmp_path), TWO) == Decisions(TWO, 2.0, {"pos": 0.3})
    assert saved_decisions(written(tmp_path, abstain_below=0.75), TWO).abstain_below == 0.75
    assert saved_decisions("no-such/model-anywhere", TWO) is None  # of the hub, out of reach


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 1e-300}, "temperature"),  # whose answers were nan
        ({"temperature": float("nan")}, "temperature"),
        ({"thresholds": {"pos": 1.5}}, "thresholds"),
        ({"thresholds": {"good": 0.5}}, "unknown labels: good"),
        ({"labels": ["bad", "good"]}, "for bad, good, not neg, pos"),
        ({"abstain_below": True}, "abstain_below"),
    ],
)
def test_a_damaged_file_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    refusal(saved_decisions, written(tmp_path, **changed), TWO, says=["decisions.json", message])


@pytest.mark.parametrize(
    ("settings", "labels", "message"),
    [
        ({"tune_thresholds": "f1"}, THREE, "3 labels"),
        ({"tune_thresholds": "f1"}, NUMBER, "regression"),
        ({"tune_thresholds": "f1", "positive_class": "poss"}, TWO, "did you mean pos"),
        ({"tune_thresholds": "f1", "positive_class": "x"}, SEVERAL, "name one of two classes"),
        ({"calibrate": True}, NUMBER, "regression"),
        ({"abstain_below": 0.7}, SEVERAL, "multi_label"),
    ],
)
def test_settings_that_do_not_fit_the_labels(
    settings: dict[str, Any], labels: Labels, message: str
) -> None:
    refusal(check, DecisionSettings(**settings), labels, says=[list(settings)[-1], message])
