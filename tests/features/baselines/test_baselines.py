"""The largest class and tf-idf as baselines: their metrics by hand, and their limits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.config import TaskSettings, build
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.outputs import Evaluation
from toolkit.features.baselines.baselines import (
    LARGEST,
    LINEAR,
    MODEL,
    baselines,
    read_baselines,
    write_baselines,
)
from toolkit.features.baselines.feature import FEATURE

THREE = Labels("single_label_classification", ("a", "b", "c"), ("label",))
SEVERAL = Labels("multi_label_classification", ("a", "b", "c"), ("label",))
ONE = Labels("multi_label_classification", ("a",), ("label",))


def made(count: int, seed: int, several: Labels | None = None) -> Split:
    """Texts of nine words, of which a bigram determines the class; the first class is the largest."""
    generator = np.random.default_rng(seed)
    truth = generator.choice(3, count, p=[0.6, 0.3, 0.1])
    tokens = generator.integers(10, 40, (count, 9)).astype(np.int32)
    tokens[:, 4] = 5
    tokens[:, 5] = 6 + truth
    labels: Any = np.eye(3, dtype=np.float32)[truth][:, : several.size] if several else truth
    return Split("test", Path(), tokens.ravel(), np.arange(count + 1) * 9, labels, np.arange(count))


@pytest.mark.parametrize("labels", [THREE, SEVERAL, ONE])
def test_the_metrics_of_each_model(labels: Labels) -> None:
    several = None if labels is THREE else labels
    train, split = made(400, 1, several), made(301, 2, several)
    logits = np.random.default_rng(0).normal(size=(301, labels.size)).astype(np.float32)
    models = baselines(train, split, logits, ClassAnswers(labels))
    truth = split.labels if several else np.eye(3)[split.labels]
    assert list(models) == [LARGEST, LINEAR, MODEL]
    assert models[LARGEST]["accuracy"]["value"] == pytest.approx(truth[:, 0].mean())
    assert models[LINEAR]["accuracy"]["value"] > 0.95
    right = (logits > 0) == truth if several else (logits.argmax(1) == split.labels)[:, None]
    accuracy = models[MODEL]["accuracy"]
    assert accuracy["value"] == pytest.approx(right.all(axis=1).mean())
    assert accuracy["low"] < accuracy["value"] < accuracy["high"]


def test_the_file_is_read_for_its_own_evaluation_only(tmp_path: Path) -> None:
    split, logits = made(50, 2), np.zeros((50, 3), np.float32)
    train = made(90, 1)
    lines = write_baselines(tmp_path, train, split, logits, ClassAnswers(THREE))
    assert LINEAR in lines[0]
    assert LINEAR in lines[1]  # warns that the model is not better
    same, other = (Evaluation("test", {"num_samples": count}, None) for count in (50, 51))
    content: Any = read_baselines(tmp_path, same)
    assert list(content["models"]) == [LARGEST, LINEAR, MODEL]
    assert read_baselines(tmp_path, other) is None
    settings = build(TaskSettings, {"baselines": False})
    assert FEATURE.results(tmp_path, settings, None, None, None) == ()
    assert list(tmp_path.iterdir()) == []
    assert read_baselines(tmp_path, same) is None
