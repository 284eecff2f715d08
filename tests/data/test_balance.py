"""toolkit/data/balance.py: what a row weighs and how often it is drawn, by its class."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from tests.faults import refusal
from tests.splits import of_lengths
from toolkit.config import ObjectiveSettings
from toolkit.data.balance import _weights_by_name, weigh_classes
from toolkit.data.batches import epoch_order
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, Labels
from toolkit.data.prepare import Data
from toolkit.data.tokens import Split

COUNTS = {"often": 160, "rare": 10, "never": 0, "some": 40}
CLASSES = np.random.default_rng(3).permutation(np.repeat(np.arange(4), list(COUNTS.values())))
FLAGS = np.zeros((200, 4), np.float32)
FLAGS[:150, 0] = FLAGS[:8, 1] = FLAGS[::2, 3] = 1


def split_of(labels: np.ndarray, name: str = "train") -> Split:
    return replace(of_lengths(np.arange(len(labels)) % 50 + 3), name=name, labels=labels)


def weighed(labels: np.ndarray, problem: Any = SINGLE, **asked: Any) -> Data:
    """With a validation split that has no row of `some`."""
    splits = (split_of(labels), split_of(labels[:0], "validation"), None)
    if problem == SINGLE:
        splits = (splits[0], split_of(np.array([0, 1, 1, 2]), "validation"), None)
    targets = Labels(problem, tuple(COUNTS), ("label",))
    data = Data(Path(), "", "text", None, 8, (), targets, *splits)
    return weigh_classes(data, ObjectiveSettings(**asked), torch.device("cpu"))


def test_balanced_weights_are_scikit_learns() -> None:
    data = weighed(CLASSES, class_weights="balanced")
    present = np.unique(CLASSES)
    theirs = compute_class_weight("balanced", classes=present, y=CLASSES)
    expected = dict(zip(present, theirs, strict=True)) | {2: 1.0}  # which training has none of
    for split in (data.train, data.validation):
        assert split.weights == pytest.approx([expected[label] for label in split.labels])
    assert data.train.loss_denominators().sum() == pytest.approx(len(CLASSES))


def test_weights_of_classes() -> None:
    train = weighed(CLASSES, class_weights="rare=7.5, some = 0.5").train
    weights = [train.weights[train.labels == place][0] for place in (0, 1, 3)]
    assert weights == [1, 7.5, 0.5]
    for text in ("a,b=2, c=0.5", "c=0.5,a,b=2"):
        assert _weights_by_name("class_weights", text, ("a,b", "b", "c")).tolist() == [2, 1, 0.5]
    refusal(_weights_by_name, "class_weights", "b=2,c", ("b", "c"), says=["no class ''"])
    for wrong in ("rare=0", "rare=nan", "rare=x"):
        refusal(weighed, CLASSES, class_weights=wrong, match="a number above 0")
    refusal(weighed, CLASSES, class_weights="even", match="there is no class ''")
    match = r"rara=2: there is no class 'rara' \(did you mean rare\?\): there are often, "
    refusal(weighed, CLASSES, class_weights="rara=2", match=match)


def test_sampling_draws_classes_as_asked() -> None:
    shares = {"balanced": [1 / 3, 1 / 3, 0, 1 / 3], "sqrt": [0.5715, 0.1429, 0, 0.2857]}
    for sampling, expected in shares.items():
        data = weighed(CLASSES, sampling=sampling)
        lengths, chances = data.train.lengths, data.train.sampling_probabilities
        epochs = [epoch_order(lengths, 32, 1, epoch, True, chances) for epoch in range(60)]
        drawn = np.bincount(CLASSES[np.concatenate(epochs)], minlength=4) / (60 * len(CLASSES))
        assert drawn == pytest.approx(expected, abs=0.02)
        assert data.validation.sampling_probabilities is None


def test_positive_weights_are_negatives_over_positives() -> None:
    assert weighed(FLAGS, MULTI, pos_weight="rare=9").pos_weight.tolist() == [1, 9, 1, 1]
    data = weighed(FLAGS, MULTI, pos_weight="balanced")
    assert data.pos_weight.tolist() == pytest.approx([50 / 150, 192 / 8, 1, 1])
    everywhere = weighed(np.ones_like(FLAGS), MULTI, pos_weight="balanced")
    assert everywhere.pos_weight.tolist() == [1] * 4


def test_what_does_not_fit_the_labels_is_refused() -> None:
    for problem, setting, value, match in (
        (REGRESSION, "class_weights", "balanced", "--class_weights balanced does not fit regr"),
        (REGRESSION, "loss", "focal", "--loss focal does not fit regression"),
        (MULTI, "class_weights", "balanced", "use --pos_weight"),
        (MULTI, "sampling", "sqrt", "--sampling sqrt does not fit multi label"),
        (SINGLE, "pos_weight", "balanced", "use --class_weights"),
    ):
        refusal(weighed, CLASSES, problem, **{setting: value}, match=match)


def test_a_run_says_the_counts_and_unasked_that_they_are_uneven() -> None:
    rows, missing, advice = weighed(CLASSES).notes
    assert rows.endswith("often 160, some 40, rare 10, never 0")
    assert missing.startswith("validation has no row of some:")
    assert "often has 16 times as many rows as rare; --class_weights balanced, --sampl" in advice
    assert "imbalanced" not in " ".join(weighed(np.arange(210) % 4).notes)
    assert "rare is in 4 % of the rows; --pos_weight" in weighed(FLAGS, MULTI).notes[-1]
