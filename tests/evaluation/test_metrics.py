"""toolkit/evaluation: the metrics in eval.jsonl, and the one that selects the best model."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from tests.faults import refusal
from tests.splits import of_lengths
from toolkit.config import ProblemType
from toolkit.data.labels import Labels
from toolkit.evaluation import Best, Evaluation, Outputs, classification_metrics
from toolkit.evaluation.outputs import BatchSizes
from toolkit.report.files import RunFiles

SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
ALONE: Any = SimpleNamespace(
    is_main_process=True, device=torch.device("cpu"), gather=lambda tensor: tensor
)


def numbers_of(problem: ProblemType, names: str, logits: Any, truth: Any) -> dict[str, Any]:
    return classification_metrics(logits, truth, Labels(problem, tuple(names), ("label",)))


@pytest.mark.parametrize("problem", [SINGLE, MULTI])
def test_numbers_are_scikit_learns(problem: ProblemType) -> None:
    """A class without labels and predictions counts as zero."""
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(60, 4)) - [0, 0.2, 0.5, 20]
    truth: Any = generator.random((60, 4)) < [0.5, 0.3, 0.2, 0]
    guess: Any = logits > 0
    averages = ["macro", "weighted", "micro"]
    if problem == SINGLE:
        truth, guess = generator.integers(0, 3, 60), logits.argmax(axis=1)
        averages.remove("micro")
    labels = {"labels": range(4), "zero_division": 0}
    expected = {"accuracy": sk.accuracy_score(truth, guess)}
    for average in averages:
        expected[f"f1_{average}"] = sk.f1_score(truth, guess, average=average, **labels)
    numbers = numbers_of(problem, "abcd", logits, truth)
    of_classes, matrix = numbers.pop("per_class"), numbers.pop("confusion_matrix", None)
    assert numbers == pytest.approx(expected)
    theirs = np.array(sk.precision_recall_fscore_support(truth, guess, **labels))
    mine = np.array([[*of_classes[name].values()] for name in "abcd"])
    assert [*of_classes["a"]] == ["precision", "recall", "f1", "support"]
    np.testing.assert_allclose(mine.T, theirs)
    if problem == SINGLE:  # rows: the truth
        assert matrix == sk.confusion_matrix(truth, guess, labels=range(4)).tolist()


def test_regression_numbers() -> None:
    """A constant has no correlation: 0."""
    correlation = np.corrcoef([1, 2, 4], [1, 3, 2])[0, 1]
    for logits, truth, mse, mae, pearson in (
        ([1, 2, 4], [1, 3, 2], 5 / 3, 1, correlation),
        ([1, 1], [1, 2], 0.5, 0.5, 0),
        ([1, 2], [3, 3], 2.5, 1.5, 0),
        ([1], [2], 1, 1, 0),
    ):
        numbers = numbers_of("regression", "y", np.c_[logits], np.array(truth))
        assert numbers == pytest.approx({"mse": mse, "mae": mae, "pearson": pearson})


@pytest.mark.parametrize("score", [np.float32(0.25), np.array(0.25), torch.tensor(0.25)])
def test_metrics_become_json(score: Any, tmp_path: Path) -> None:
    metrics = {"score": score, "right": np.int64(3), "bad": np.float32(np.nan), "each": np.arange(4).reshape(2, 2),
               "by": {7: [torch.ones(2)]}, "worst": [{"f1": -math.inf}]}  # fmt: skip
    split = replace(of_lengths(np.ones(2, np.int64)), name="validation")
    tokenizer = SimpleNamespace(pad_token_id=0, padding_side="right")
    outputs = Outputs(ALONE, split, tokenizer, BatchSizes(4))
    evaluation = outputs.make_evaluation(np.ones(2, np.float32), metrics)
    for name in ("score", "right"):
        best = Best(name)
        assert best.update(evaluation, 1)
        assert best.value == float(metrics[name])
    assert evaluation.single_numbers["score"] == 0.25
    RunFiles(ALONE, tmp_path).append_evaluation(evaluation, 1)
    line = json.loads((tmp_path / "eval.jsonl").read_text())
    expected = {"score": 0.25, "right": 3, "bad": None, "each": [[0, 1], [2, 3]], "by": {"7": [[1, 1]]},
                "worst": [{"f1": None}]}  # fmt: skip
    assert {key: line[key] for key in metrics} == expected


def test_the_best_evaluation() -> None:
    for metric, values, counters, best_step in (
        ("accuracy", [0.5, 0.6, 0.6, 0.4, 0.7], [0, 0, 1, 2, 0], 5),
        ("eval_loss", [2.0, 1.0, 1.0, math.nan, 0.5], [0, 0, 1, 2, 0], 5),
        ("mae", [2.0, 3.0], [0, 1], 1),
        ("perplexity", [2.0, 3.0], [0, 1], 1),
        ("regret", [2.0, 3.0], [0, 0], 2),
        ("pearson", [None, math.nan], [0, 1], 1),
        ("loss", [math.nan, 3.0, None], [0, 0, 1], 2),
    ):
        best, name = Best(metric), metric.removeprefix("eval_")
        for step, (value, counter) in enumerate(zip(values, counters, strict=True), 1):
            evaluation = Evaluation("validation", {name: value}, None)
            assert best.update(evaluation, step) is (counter == 0)
            assert best.patience_counter == counter
            state = json.loads(json.dumps(best.state(), allow_nan=False))
            best = Best(metric)
            best.restore(state)
        assert best.step == best_step
    reversed_best = Best("loss", greater_is_better=True)
    reversed_best.restore(state)
    assert reversed_best.step == 0
    refusal(best.update, Evaluation("validation", {"other": 1.0}, None), 9, says=["loss", "other"])
    refusal(Best("note").check, {"loss": 1.0, "note": "text"}, match="note")
