"""The largest class and tf-idf as baselines: their metrics by hand, and their limits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.config import TaskSettings, build
from toolkit.data.labels import MULTI, SINGLE, Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.outputs import Evaluation
from toolkit.features.baselines import baselines as compared
from toolkit.features.baselines.baselines import LARGEST, LINEAR, MODEL
from toolkit.features.baselines.feature import FEATURE

THREE = Labels(SINGLE, ("a", "b", "c"), ("label",))
SEVERAL = Labels(MULTI, ("a", "b", "c"), ("label",))
ONE = Labels(MULTI, ("a",), ("label",))


def made(count: int, seed: int, labels: Labels = THREE) -> Split:
    """Texts of nine words, of which a bigram determines the class; the first is the largest."""
    generator = np.random.default_rng(seed)
    truth: Any = generator.choice(3, count, p=[0.6, 0.3, 0.1])
    tokens = generator.integers(10, 40, (count, 9)).astype(np.int32)
    tokens[:, 4] = 5
    tokens[:, 5] = 6 + truth
    if labels is not THREE:
        truth = np.eye(3, dtype=np.float32)[truth][:, : labels.size]
    return Split("test", Path(), tokens.ravel(), np.arange(count + 1) * 9, truth, np.arange(count))


@pytest.mark.parametrize("labels", [THREE, SEVERAL, ONE])
def test_the_metrics_of_each_model(labels: Labels) -> None:
    train, split = made(400, 1, labels), made(301, 2, labels)
    logits = np.random.default_rng(0).normal(size=(301, labels.size)).astype(np.float32)
    models = compared.baselines(train, split, logits, ClassAnswers(labels))
    truth, guess = split.labels, logits > 0
    if labels is THREE:
        truth, guess = np.eye(3)[truth], np.eye(3)[logits.argmax(axis=1)]
    assert list(models) == [LARGEST, LINEAR, MODEL]
    assert models[LARGEST]["accuracy"]["value"] == pytest.approx(truth[:, 0].mean())
    assert models[LINEAR]["accuracy"]["value"] > 0.95
    accuracy = models[MODEL]["accuracy"]
    assert accuracy["value"] == pytest.approx((guess == truth).all(axis=1).mean())
    assert accuracy["low"] < accuracy["value"] < accuracy["high"]


def test_the_file_is_read_for_its_own_evaluation_only(tmp_path: Path) -> None:
    split, logits = made(50, 2), np.zeros((50, 3), np.float32)
    lines = compared.write_baselines(tmp_path, made(90, 1), split, logits, ClassAnswers(THREE))
    assert [line.split("  ")[-1] for line in lines[:3]] == [LARGEST, LINEAR, MODEL]
    assert LINEAR in lines[3]  # warns that the model is not better
    same, other = (Evaluation("test", {"num_samples": count}, None) for count in (50, 51))
    content: Any = compared.read_baselines(tmp_path, same)
    assert list(content["models"]) == [LARGEST, LINEAR, MODEL]
    assert compared.read_baselines(tmp_path, other) is None
    settings = build(TaskSettings, {"baselines": False})
    assert FEATURE.results(tmp_path, settings, None, None, None) == ()
    assert compared.read_baselines(tmp_path, same) is None


def test_the_linear_model_is_left_out_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compared, "_MAX_CLASSES", 2)
    logits = np.zeros((50, 3), np.float32)
    lines = compared.write_baselines(
        tmp_path, made(90, 1), made(50, 2), logits, ClassAnswers(THREE)
    )
    assert lines[2] == f"  {LINEAR} is left out: there are more than 2 classes"
