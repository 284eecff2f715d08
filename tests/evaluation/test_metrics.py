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

from tests.faults import refusal
from tests.splits import of_lengths
from toolkit.config import ProblemType
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation import (
    Best,
    Evaluation,
    Outputs,
    classification_metrics,
)
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.outputs import BatchSizes
from toolkit.objective.losses import sample_losses
from toolkit.report.files import RunFiles

SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
ALONE: Any = SimpleNamespace(
    is_main_process=True, device=torch.device("cpu"), gather=lambda tensor: tensor
)
TOKENIZER = SimpleNamespace(pad_token_id=0, padding_side="right")


def numbers_of(problem: ProblemType, names: str, logits: Any, truth: Any) -> dict[str, Any]:
    array = np.array(logits, np.float32)
    split = split_of(problem, truth)
    losses = sample_losses(torch.from_numpy(array), torch.from_numpy(split.labels), problem).numpy()
    outputs = outputs_of(split, ClassAnswers(Labels(problem, tuple(names), ("label",))))
    outputs._parts = [[split.rows, array, losses]]
    return outputs.evaluation(classification_metrics).numbers


def outputs_of(split: Split, answers: Any = None) -> Outputs:
    return Outputs(ALONE, split, TOKENIZER, BatchSizes(4), answers)


def split_of(problem: ProblemType, truth: Any) -> Split:
    labels = np.array(truth, np.int64 if problem == SINGLE else np.float32)
    return replace(of_lengths(np.ones(len(labels), np.int64)), name="validation", labels=labels)


def test_outputs_in_bf16() -> None:
    outputs = outputs_of(split_of(SINGLE, [0, 1]))
    outputs.add([torch.tensor([0, 1]), torch.ones(2, 3, dtype=torch.bfloat16)])
    assert outputs._parts[0][1].dtype == np.float32


@pytest.mark.parametrize("problem", [SINGLE, MULTI])
def test_numbers_are_scikit_learns(problem: ProblemType) -> None:
    """A class without labels and predictions counts as zero."""
    from sklearn import metrics as sk

    generator = np.random.default_rng(5)
    logits = generator.normal(size=(60, 4)) - [0, 0.2, 0.5, 20]
    truth = (
        generator.integers(0, 3, 60)
        if problem == SINGLE
        else generator.random((60, 4)) < [0.5, 0.3, 0.2, 0]
    )
    guess = logits.argmax(axis=1) if problem == SINGLE else logits > 0
    numbers = numbers_of(problem, "abcd", logits, truth)
    labels = {"labels": range(4), "zero_division": 0}
    assert (numbers["num_samples"], numbers["accuracy"]) == (
        60,
        pytest.approx(sk.accuracy_score(truth, guess)),
    )
    averages = ("macro", "weighted") if problem == SINGLE else ("macro", "micro", "weighted")
    for average in averages:
        assert numbers[f"f1_{average}"] == pytest.approx(
            sk.f1_score(truth, guess, average=average, **labels)
        )
    theirs = sk.precision_recall_fscore_support(truth, guess, **labels)
    ours = [
        [numbers["per_class"][name][key] for name in "abcd"]
        for key in ("precision", "recall", "f1", "support")
    ]
    assert np.array(ours) == pytest.approx(np.array(theirs))
    if problem == SINGLE:  # rows: the truth
        assert (
            numbers["confusion_matrix"]
            == sk.confusion_matrix(truth, guess, labels=range(4)).tolist()
        )
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        assert numbers["loss"] == pytest.approx(
            sk.log_loss(truth, chances, labels=range(4)), rel=1e-4
        )
    assert ("confusion_matrix" in numbers) == (problem == SINGLE)


@pytest.mark.parametrize(
    ("logits", "truth", "mse", "mae", "pearson"),
    [([1, 2, 4], [1, 3, 2], 5 / 3, 1, np.corrcoef([1, 2, 4], [1, 3, 2])[0, 1]),
     ([1, 1], [1, 2], 0.5, 0.5, 0), ([1, 2], [3, 3], 2.5, 1.5, 0), ([1], [2], 1, 1, 0)],
)  # fmt: skip
def test_regression_numbers(
    logits: list[float], truth: list[float], mse: float, mae: float, pearson: float
) -> None:
    """A constant has no correlation: 0."""
    numbers = numbers_of("regression", "y", np.c_[logits], truth)
    assert [numbers[name] for name in ("loss", "mse", "mae", "pearson")] == pytest.approx(
        [mse, mse, mae, pearson]
    )


@pytest.mark.parametrize(("metric", "sign"), [
    ("accuracy", 1), ("eval_loss", -1), ("mae", -1), ("pearson", 1), ("perplexity", -1)
])  # fmt: skip
def test_best_metric(metric: str, sign: int) -> None:
    best = Best(metric)
    assert (best.metric, best.sign) == (metric.removeprefix("eval_"), sign)


def test_a_metric_of_the_recipe_selects_the_best_model() -> None:
    numbers = {"regret": 1.0, "f1_macro": 0.5, "note": "text"}
    for greater, sign in ((None, 1), (False, -1)):
        best = Best("regret", greater_is_better=greater)
        best.check(numbers)
        assert best.sign == sign
    refusal(Best("note").check, numbers, match="note")


@pytest.mark.parametrize(
    "score", [np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25)]
)
def test_metrics_become_json(score: Any, tmp_path: Path) -> None:
    metrics = {"score": score, "right": np.int64(3), "bad": np.float32(np.nan), "each": np.arange(4).reshape(2, 2),
               "by": {7: [torch.ones(2)]}, "worst": [{"f1": -math.inf}]}  # fmt: skip
    for name in ("score", "right"):
        best = Best(name)
        outputs = outputs_of(split_of(SINGLE, [0, 1]))
        evaluation = outputs.make_evaluation(np.ones(2, np.float32), metrics)
        assert best.update(evaluation, 1)
        assert best.value == float(metrics[name])
    assert evaluation.single_numbers["score"] == 0.25
    RunFiles(ALONE, tmp_path).append_evaluation(evaluation, 1)
    line = json.loads((tmp_path / "eval.jsonl").read_text())
    assert {key: line[key] for key in metrics} == {
        "score": 0.25, "right": 3, "bad": None, "each": [[0, 1], [2, 3]], "by": {"7": [[1, 1]]},
        "worst": [{"f1": None}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "values", "counters", "best_step"),
    [("accuracy", [0.5, 0.6, 0.6, 0.4, 0.7], [0, 0, 1, 2, 0], 5),
     ("loss", [2.0, 1.0, 1.0, math.nan, 0.5], [0, 0, 1, 2, 0], 5),
     ("pearson", [None, math.nan], [0, 1], 1), ("loss", [math.nan, 3.0, None], [0, 0, 1], 2)],
)  # fmt: skip
def test_the_best_evaluation(
    metric: str, values: list[Any], counters: list[int], best_step: int
) -> None:
    best = Best(metric)
    for step, (value, counter) in enumerate(zip(values, counters, strict=True), 1):
        assert best.update(Evaluation("validation", {metric: value}, None), step) is (counter == 0)
        assert best.patience_counter == counter
        state = json.loads(json.dumps(best.state(), allow_nan=False))
        best = Best(metric)
        best.restore(state)
    assert best.step == best_step
    reversed_best = Best(metric, greater_is_better=best.sign < 0)
    reversed_best.restore(state)
    assert reversed_best.step == 0
    refusal(best.update, Evaluation("validation", {"other": 1.0}, None), 9, says=[metric, "other"])
