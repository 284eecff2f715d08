"""Confident learning and slices: planted errors, and cases by hand."""

import numpy as np

from toolkit.data.labels import Labels
from toolkit.features.folds.label_errors import Suspect, balanced_skill, find_suspects
from toolkit.features.folds.page import _analysis
from toolkit.report.html import worst_slices


def rows_of(suspects: list[Suspect]) -> list[int]:
    return [suspect.row for suspect in suspects]


def test_planted_errors_are_found_the_most_certain_first() -> None:
    """8 % of the labels are wrong, and the model is mostly right."""
    generator = np.random.default_rng(1)
    truth = generator.integers(0, 4, 2000)
    logits = generator.normal(0, 1, (2000, 4))
    logits[np.arange(2000), truth] += 5
    labels = np.where(
        generator.random(2000) < 0.08, (truth + generator.integers(1, 4, 2000)) % 4, truth
    )
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    suspects = find_suspects(probabilities, labels, probabilities.argmax(axis=1))
    rows, wrong = rows_of(suspects), set(np.flatnonzero(labels != truth).tolist())
    assert len(set(rows)) == len(rows)
    assert len(wrong & set(rows)) > max(0.85 * len(wrong), 0.75 * len(rows))
    assert len(wrong & set(rows[:100])) == 100
    margins = [suspect.margin for suspect in suspects]
    assert margins == sorted(margins)
    for row, (other,), margin in suspects:
        assert other != labels[row]
        assert margin == probabilities[row, labels[row]] - probabilities[row, other]


def test_a_row_below_every_threshold_is_not_suspected() -> None:
    """By hand: the thresholds are 0.75 and 0.65; the third row reaches neither, the fourth that of the first class."""
    probabilities = np.array(
        [[0.9, 0.1], [0.6, 0.4], [0.55, 0.45], [0.15, 0.85], [0.8, 0.2], [0.05, 0.95]]
    )
    labels = np.array([0, 0, 1, 1, 1, 1])
    answers = probabilities.argmax(axis=1)
    assert rows_of(find_suspects(probabilities, labels, answers)) == [4]
    assert find_suspects(probabilities, 1 - labels, answers)[0].suggested in ((0,), (1,))
    assert (
        find_suspects(probabilities[:2], labels[:2], answers[:2]) == []
    )  # a class without rows has no threshold


def test_each_of_several_labels_is_judged_for_itself() -> None:
    generator = np.random.default_rng(2)
    truth = generator.random((1000, 3)) < 0.4
    probabilities = 1 / (1 + np.exp(-generator.normal(7.0 * truth - 3.5, 1)))
    labels = truth.copy()
    labels[:20, 1] ^= True
    labels[10:30, 2] ^= True
    suspects = find_suspects(probabilities, labels, probabilities > 0.5)
    suggested = {suspect.row: suspect.suggested for suspect in suspects}
    assert (
        sum(suggested.get(row) == tuple(np.flatnonzero(truth[row]).tolist()) for row in range(30))
        > 20
    )


def test_a_row_whose_label_is_the_answer_is_not_suspected() -> None:
    """The class of the last two rows is poorly learned: its threshold is 0.2, which the first row reaches too, whose
    own class has 0.7, below its threshold of 0.75. The answer need not be the likeliest class (`--tune_thresholds`)."""
    probabilities = np.array([[0.7, 0.3], [0.8, 0.2], [0.75, 0.25], [0.9, 0.1], [0.7, 0.3]])
    labels, answers = np.array([0, 0, 0, 1, 1]), np.zeros(5, int)
    assert rows_of(find_suspects(probabilities, labels, answers)) == [3]
    assert rows_of(find_suspects(probabilities, labels, np.array([1, 0, 0, 0, 1]))) == [3, 0]
    both = np.stack([1 - labels, labels], axis=1)
    assert find_suspects(probabilities, both, both) == []


def test_the_suggestion_is_the_predicted_class() -> None:
    """The last row is the only one of the third class, whose threshold is 0.01: the first row reaches it and no other
    threshold (0.75 and 0.8), and is predicted as the second class."""
    probabilities = np.array(
        [[0.4, 0.58, 0.02], [0.99, 0.01, 0], [0.86, 0.14, 0], [0.2, 0.8, 0], [0.5, 0.49, 0.01]]
    )
    labels = np.array([0, 0, 0, 1, 2])
    (suspect,) = find_suspects(probabilities, labels, probabilities.argmax(axis=1))
    assert suspect[:2] == (0, (1,))
    assert suspect.margin == 0.4 - 0.58


def test_skill_is_the_mean_over_the_labels_that_vary() -> None:
    labels = np.array([[0, 0, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]])
    assert balanced_skill(labels, labels * [1, 0, 0]) == 0.5  # all of one, none of another
    assert (
        balanced_skill(labels[:, 0], np.full(4, 2))
        < balanced_skill(labels[:, 0], np.zeros(4, int))
        == 0
    )


def test_slices_that_are_worse_than_chance() -> None:
    wrong = np.zeros(400, bool)
    wrong[:60:2] = wrong[60::12] = True
    groups = {
        "source": ["shop"] * 60 + ["web"] * 340,
        "all": ["same"] * 400,
        "tiny": ["a"] * 4 + ["b"] * 396,
    }
    (worst,) = worst_slices(wrong, groups)
    assert worst[:4] == ("source", "shop", 60, 0.5)
    assert worst_slices(np.zeros(9, bool), {"x": ["a"] * 9}) == []


def test_rows_of_a_fold_without_a_column_are_in_none_of_its_slices() -> None:
    """The column has only one value in fold 1, where 3 of 4 answers are wrong; in fold 2 those for `shop` are."""
    lines = []
    for row in range(120):
        fold, shop = 1 + row % 2, row % 6 == 1
        wrong = row % 8 > 0 if fold == 1 else shop
        sources = {"source": "shop" if shop else "web"} if fold == 2 else {}
        lines.append({"id": row, "fold": fold, "text": f"{row}", "tokens": 9, "sources": sources, "label": "a",
                      "prediction": "ab"[wrong], "probabilities": [0.4, 0.6] if wrong else [0.9, 0.1]})  # fmt: skip
    slices = _analysis(lines, Labels("single_label_classification", ("a", "b"), ()))["slices"]
    assert [each[:4] for each in slices] == [("source", "shop", 20, 1.0)]
