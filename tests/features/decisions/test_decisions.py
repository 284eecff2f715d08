"""Tuned decisions in whole runs: equal under every launch, saved with the model, applied by all that loads it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import toolkit
from tests import inputs
from tests.inputs import write_rows
from tests.matrix import TINY, runs, words_of
from tests.runs import assert_same_run, lines_of, start, train
from toolkit.evaluation.answers import labels_of
from toolkit.features.decisions.decisions import saved_decisions
from toolkit.pretrained import load_config


def make_files(folder: Path) -> None:
    table = pd.read_csv(inputs.reviews())
    table[:70].to_csv(folder / "train.csv", index=False)
    table[70:].to_csv(folder / "test.csv", index=False)
    write_rows(folder / "several.jsonl", "multi-label")


def file(name: str) -> Path:
    return inputs.shared("decisions", make_files) / name


COMMON = [*TINY, "--max_steps", 8, "--eval_every", 2, "--checkpoint_every", 4, "--learning_rate", "1e-2",
          "--global_batch_size", 20, "--per_device_batch_size", 6, "--metric_for_best_model", "loss"]  # fmt: skip
PLAIN = [
    *COMMON,
    "--train_file",
    partial(file, "train.csv"),
    "--test_file",
    partial(file, "test.csv"),
]
SETTINGS = "--positive_class neg --calibrate --abstain_below 0.55 --tune_thresholds".split()
JOBS = {
    "plain": PLAIN,
    "two": [*PLAIN, *SETTINGS, "precision_at_recall=0.9"],
    "several": [*COMMON, "--train_file", partial(file, "several.jsonl"), "--calibrate", "--tune_thresholds", "f1"],
}  # fmt: skip


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
    assert not (plain / "model" / "decisions.json").exists()
    effect = last["decisions"]
    before, after = effect["before"], effect["after"]
    assert last["loss"] == without["loss"]
    assert before.items() - {("ece", before["ece"])} <= without.items()
    for name in ("accuracy", "f1_macro"):
        assert last[name] == after[name]
    lines, names = lines_of(run / "predictions.jsonl"), ("neg", "pos")
    chances = np.array([line["probabilities"] for line in lines])
    guess = np.where(chances[:, 0] > effect["thresholds"]["neg"], 0, 1)
    correct = np.array([names[c] == line["label"] for c, line in zip(guess, lines, strict=True)])
    assert last["accuracy"] == pytest.approx(correct.mean())
    sure = chances[np.arange(141), guess] >= 0.55
    assert 0 < effect["answered"] == sure.sum() < 141
    assert effect["accuracy_of_answered"] == pytest.approx(correct[sure].mean())


def test_all_that_loads_the_model_applies_decisions(tmp_path: Path, no_launcher: None) -> None:
    run, rows, out = run_of("single", "two"), pd.read_csv(file("test.csv")), tmp_path / "out.csv"
    expected = [line["prediction"] for line in lines_of(run / "predictions.jsonl")]
    assert None in expected
    start(["toolkit", "predict", run / "model", file("test.csv"), "--output", out]).succeeded()
    written = pd.read_csv(out)["prediction"]
    assert [None if pd.isna(cell) else cell for cell in written] == expected
    assert [line["prediction"] for line in toolkit.predict(run / "model", rows["text"])] == expected
    numbers = toolkit.evaluate(run / "model", rows["text"], rows["label"])
    assert numbers["accuracy"] == pytest.approx(lines_of(run / "eval.jsonl")[-1]["accuracy"])
    # they were tuned on the weights in model/; a checkpoint has none
    for source, has_file in (("checkpoints/best", False), ("model", True)):
        converted = tmp_path / source
        toolkit.convert(run / source, converted)
        labels = labels_of(load_config(toolkit.settings(model_name_or_path=str(converted)).model))
        assert (saved_decisions(str(converted), labels) is not None) is has_file


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
