"""toolkit/data/balance.py: what a row weighs and how often it is drawn, by its class."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.faults import refusal
from tests.splits import global_batches, of_lengths
from toolkit.config import ObjectiveSettings, ProblemType
from toolkit.data.balance import similar_names, weigh_classes
from toolkit.data.labels import Labels
from toolkit.data.prepare import Data
from toolkit.data.tokens import Split

COUNTS = {"often": 160, "rare": 10, "never": 0, "some": 40}


def labels_of(problem: ProblemType = "single_label_classification") -> Labels:
    return Labels(problem, tuple(COUNTS), ("label",))


def split_of(name: str = "train", labels: Any = None) -> Split:
    every = np.repeat(np.arange(len(COUNTS)), list(COUNTS.values())) if labels is None else labels
    every = np.random.default_rng(3).permutation(every)
    return replace(of_lengths(np.arange(len(every)) % 50 + 3), name=name, labels=every)


def weighed(
    splits: dict[str, Split], problem: ProblemType = "single_label_classification", **asked: Any
) -> Data:
    every: Any = {"validation": None, "test": None, **splits}
    data = Data(Path(), "", "text", None, 8, (), labels_of(problem), **every)
    return weigh_classes(data, ObjectiveSettings(**asked), torch.device("cpu"))


def balanced(**asked: Any) -> dict[str, Split]:
    splits = {"train": split_of(), "validation": split_of("validation", np.array([0, 1, 1, 2]))}
    return weighed(splits, **asked).splits


def test_balanced_weights_are_scikit_learns() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    splits = balanced(class_weights="balanced")
    train, other = splits["train"], splits["validation"]
    classes = np.unique(train.labels)
    expected = dict(
        zip(classes, compute_class_weight("balanced", classes=classes, y=train.labels), strict=True)
    )
    assert train.weights == pytest.approx([expected[label] for label in train.labels])
    assert train.loss_denominators().sum() == pytest.approx(len(train))
    # by the training rows' counts; a class that training has none of weighs 1
    assert other.weights == pytest.approx([{**expected, 2: 1.0}[label] for label in other.labels])


def test_weights_of_classes() -> None:
    train = balanced(class_weights="rare=7.5, some = 0.5")["train"]
    weights = [train.weights[train.labels == place][0] for place in (0, 1, 3)]
    assert weights == [1, 7.5, 0.5]


@pytest.mark.parametrize(
    ("given", "said"),
    [("rara=2,often=1", r"rara=2: there is no class 'rara' \(did you mean rare\?\): there are often, rare, "),
     ("rare=0", "a number above 0"), ("rare=nan", "a number above 0"), ("even", "there is no class ''"),
     ("rare=x,often=-1", "^2 faults")],
)  # fmt: skip
def test_weights_that_cannot_be_meant(given: str, said: str) -> None:
    refusal(balanced, class_weights=given, match=said, lines=3 if said == "^2 faults" else 1)


@pytest.mark.parametrize(
    ("sampling", "shares"),
    [("balanced", {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}), ("sqrt", {0: 0.5715, 1: 0.1429, 3: 0.2857})],
)
def test_sampling_draws_classes_as_asked(sampling: str, shares: dict[int, float]) -> None:
    train = balanced(sampling=sampling)["train"]
    assert train.sampling_probabilities.sum() == pytest.approx(1)
    epochs = [
        global_batches(train.lengths, 32, 1, epoch, True, train.sampling_probabilities)
        for epoch in range(60)
    ]
    drawn = np.bincount(train.labels[np.concatenate([*chain(*epochs)])]) / (60 * len(train))
    assert {place: drawn[place] for place in shares} == pytest.approx(shares, abs=0.02)
    assert balanced(sampling=sampling)["validation"].sampling_probabilities is None


def flags() -> Split:
    rows = np.zeros((200, 4), np.float32)
    rows[:150, 0], rows[:8, 1], rows[::2, 3] = 1, 1, 1
    return replace(of_lengths(np.full(200, 5)), labels=rows)


def test_positive_weights_are_negatives_over_positives() -> None:
    every = replace(flags(), labels=np.ones((200, 4), np.float32))
    balanced = [50 / 150, 192 / 8, 1, 1]
    for train, setting, expected in (
        (flags(), "balanced", balanced), (every, "balanced", [1] * 4), (flags(), "rare=9", [1, 9, 1, 1]),
        (flags(), None, None),
    ):  # fmt: skip
        data = weighed({"train": train}, "multi_label_classification", pos_weight=setting)
        assert (None if setting is None else data.pos_weight.tolist()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("problem", "asked", "said"),
    [
        (
            "regression",
            {"class_weights": "balanced"},
            "--class_weights balanced does not fit regression",
        ),
        ("regression", {"loss": "focal"}, "--loss focal is for classes"),
        ("multi_label_classification", {"class_weights": "balanced"}, "use --pos_weight"),
        (
            "multi_label_classification",
            {"sampling": "sqrt"},
            "--sampling sqrt does not fit multi label",
        ),
        ("single_label_classification", {"pos_weight": "balanced"}, "use --class_weights"),
    ],
)
def test_what_does_not_fit_the_labels_is_refused(
    problem: ProblemType, asked: dict[str, Any], said: str
) -> None:
    refusal(weighed, {"train": split_of()}, problem, **asked, match=said)


def test_names_that_differ_in_case_and_blanks_only() -> None:
    assert not similar_names(["neg", "pos", "1", "01", "好"])
    (note,) = similar_names(["neg", "po s", "pos", "Neg"])
    assert "'neg' and 'Neg', 'po s' and 'pos'" in note


def test_a_run_says_the_counts_and_unasked_that_they_are_uneven() -> None:
    def described(
        train: Split, problem: ProblemType = "single_label_classification", **asked: Any
    ) -> tuple[Any, str]:
        data = weighed({"train": train}, problem, **asked)
        return [*data.notes], data.advice

    splits = {"train": split_of(), "test": split_of("test", np.array([0, 1, 1]))}
    *_, missing = weighed(splits).notes
    assert missing.startswith("test has no row of never, some:")
    lines, advice = described(split_of())
    assert lines == ["rows of each class in train: often 160, some 40, rare 10, never 0"]
    assert (
        "often has 16 times as many rows as rare; --class_weights balanced, --sampling balanced"
        in advice
    )
    lines, advice = described(split_of(), class_weights="rare=2", sampling="sqrt")
    assert lines[1].endswith("often 1, some 1, rare 2, never 1")
    assert lines[2].endswith("often 57.1, some 28.6, rare 14.3, never 0")
    assert advice == described(replace(split_of(), labels=np.arange(210) % 4))[1] == ""
    assert (
        "rare is in 4 % of the rows; --pos_weight"
        in described(flags(), "multi_label_classification")[1]
    )
    assert described(split_of(), "regression") == ([], "")
