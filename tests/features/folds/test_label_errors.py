"""Confident learning and slices, on planted errors and by hand."""

from __future__ import annotations

import numpy as np

from toolkit.features.folds.label_errors import skill, suspects
from toolkit.report.slices import worst_slices


def planted(classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(chances of a model that is mostly right, labels with 8 % of them wrong, the true ones)."""
    generator = np.random.default_rng(seed)
    truth = generator.integers(0, classes, 2000)
    logits = generator.normal(0, 1, (2000, classes))
    logits[np.arange(2000), truth] += 5
    given = np.where(generator.random(2000) < 0.08, (truth + generator.integers(1, classes, 2000)) % classes, truth)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return chances, given, truth


def test_planted_errors_are_found_the_surest_first() -> None:
    chances, given, truth = planted(4, 1)
    found = suspects(chances, given, chances.argmax(axis=1))
    wrong = set(np.flatnonzero(given != truth).tolist())
    places = [suspect.place for suspect in found]
    assert len(set(places)) == len(places)
    assert len(wrong & set(places)) > 0.85 * len(wrong)
    assert len(wrong & set(places)) > 0.75 * len(places)
    assert len(wrong & set(places[:100])) == 100
    margins = [suspect.margin for suspect in found]
    assert margins == sorted(margins)
    for suspect in found:
        (other,) = suspect.suggested
        assert other != given[suspect.place]
        assert suspect.margin == chances[suspect.place, given[suspect.place]] - chances[suspect.place, other]


def test_a_row_below_every_threshold_is_not_suspected() -> None:
    """By hand: the thresholds are 0.75 and 0.65; the third row reaches neither, the fourth that of the first class."""
    chances = np.array([[0.9, 0.1], [0.6, 0.4], [0.55, 0.45], [0.15, 0.85], [0.8, 0.2], [0.05, 0.95]])
    given = np.array([0, 0, 1, 1, 1, 1])
    answers = chances.argmax(axis=1)
    assert [suspect.place for suspect in suspects(chances, given, answers)] == [4]
    assert suspects(chances, 1 - given, answers)[0].suggested in ((0,), (1,))
    assert suspects(chances[:2], given[:2], answers[:2]) == []  # a class without rows has no threshold


def test_each_label_of_several_is_a_question_of_its_own() -> None:
    generator = np.random.default_rng(2)
    truth = generator.random((1000, 3)) < 0.4
    chances = 1 / (1 + np.exp(-generator.normal(7.0 * truth - 3.5, 1)))
    given = truth.copy()
    given[:20, 1] ^= True
    given[10:30, 2] ^= True
    found = {suspect.place: suspect.suggested for suspect in suspects(chances, given, chances > 0.5)}
    right = {place: tuple(np.flatnonzero(truth[place]).tolist()) for place in range(30)}
    assert sum(found.get(place) == right[place] for place in range(30)) > 20


def test_a_row_whose_label_is_the_answer_is_not_suspected() -> None:
    """The class of the last two rows is hardly known: its threshold is 0.2, which the first row reaches, too, with its
    own class at 0.7 below the mean of 0.75. Where a threshold decides, not the likeliest class, its answer counts."""
    chances = np.array([[0.7, 0.3], [0.8, 0.2], [0.75, 0.25], [0.9, 0.1], [0.7, 0.3]])
    given, answers = np.array([0, 0, 0, 1, 1]), np.zeros(5, int)
    assert [suspect.place for suspect in suspects(chances, given, answers)] == [3]
    assert [suspect.place for suspect in suspects(chances, given, np.array([1, 0, 0, 0, 1]))] == [3, 0]
    both = np.stack([1 - given, given], axis=1)
    assert [suspect.place for suspect in suspects(chances, both, both)] == []


def test_skill_is_the_mean_over_the_labels_that_vary() -> None:
    labels = np.array([[0, 0, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]])
    assert skill(labels, labels * [1, 0, 0]) == 0.5  # all of the first, none of the second; the last one never varies
    assert skill(labels[:, 0], np.full(4, 2)) < skill(labels[:, 0], np.zeros(4, int)) == 0


def test_slices_that_are_worse_than_chance() -> None:
    wrong = np.zeros(400, bool)
    wrong[:60:2] = wrong[60::12] = True
    groups = {"source": ["shop" if place < 60 else "web" for place in range(400)], "all": ["same"] * 400,
              "tiny": ["a" if place < 4 else "b" for place in range(400)]}  # fmt: skip
    (found,) = worst_slices(wrong, groups)
    assert (found.name, found.value, found.rows, found.wrong) == ("source", "shop", 60, 0.5)
    assert worst_slices(np.zeros(9, bool), {"x": ["a"] * 9}) == []
