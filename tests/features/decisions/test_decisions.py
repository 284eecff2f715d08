"""Tuned decisions in whole runs: equal under every launch, saved with the model, applied by all that loads it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import toolkit
from tests.inputs import write_rows
from tests.jobs_worker import run_jobs
from tests.runs import WAYS, assert_same_run, lines_of, start, train
from toolkit.evaluation.answers import labels_of
from toolkit.features.decisions.decisions import saved_decisions
from toolkit.pretrained import load_config

pytestmark = pytest.mark.multiprocess
COMMON = ["--max_steps", 8, "--eval_every", 2, "--checkpoint_every", 4, "--global_batch_size", 20, "--dropout", 0,
          "--per_device_batch_size", 6, "--learning_rate", "1e-2", "--report_to", "none", "--mixed_precision", "no",
          "--metric_for_best_model", "loss"]  # fmt: skip
JOBS = {
    "plain": [],
    "two": [
        "--tune_thresholds",
        "precision_at_recall=0.9",
        "--positive_class",
        "neg",
        "--calibrate",
        "--abstain_below",
        "0.55",
    ],
    "several": ["--tune_thresholds", "f1", "--calibrate"],
}


def jobs(folder: Path, model: Path, reviews: Path) -> list[list[Any]]:
    folder.mkdir()
    table = pd.read_csv(reviews)
    table[:70].to_csv(folder / "train.csv", index=False)
    table[70:].to_csv(folder / "test.csv", index=False)
    several = write_rows(folder / "several.jsonl", "multi-label")
    two = ["--train_file", folder / "train.csv", "--test_file", folder / "test.csv"]
    return [
        ["recipes.cls", "--model_name_or_path", model, *(["--train_file", several] if name == "several" else two),
         *COMMON, *settings, "--output_dir", folder / name]
        for name, settings in JOBS.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path
) -> dict[str, Path]:
    """Way -> folder of its runs; under two processes each finished job is started a second time."""
    root = tmp_path_factory.mktemp("decisions")
    for way, times in (("single", 1), ("ddp x2", 2)):
        run_jobs(
            root / f"{way} jobs",
            WAYS[way],
            times * jobs(root / way, tiny_model, reviews),
            pages=True,
        )
    return {way: root / way for way in ("single", "ddp x2")}


def saved(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "model" / "decisions.json").read_text()))


@pytest.mark.parametrize("name", ["two", "several"])
def test_the_same_under_every_launch_and_when_resumed_at_the_end(
    name: str, runs: dict[str, Path]
) -> None:
    one, two = runs["single"] / name, runs["ddp x2"] / name
    assert saved(one)["temperature"] != 1
    assert saved(two)["temperature"] == pytest.approx(saved(one)["temperature"], rel=1e-3)
    assert saved(two)["thresholds"] == pytest.approx(saved(one)["thresholds"], abs=1e-4)
    assert saved(two)["step"] == saved(one)["step"]
    assert_same_run(two, one)


def test_the_test_rows_are_evaluated_with_and_without_decisions(runs: dict[str, Path]) -> None:
    run, plain = runs["single"] / "two", runs["single"] / "plain"
    last, without = (lines_of(folder / "eval.jsonl")[-1] for folder in (run, plain))
    assert (last["split"], last["num_samples"]) == ("test", 141)
    assert "decisions" not in without
    assert not (plain / "model" / "decisions.json").exists()
    effect = last.pop("decisions")
    before, after = effect["before"], effect["after"]
    assert last["loss"] == without["loss"]
    assert before | without == without | {name: before[name] for name in ("ece", "brier")}
    assert [last[name] for name in ("accuracy", "f1_macro")] == [
        after[name] for name in ("accuracy", "f1_macro")
    ]
    lines, names = lines_of(run / "predictions.jsonl"), ("neg", "pos")
    chances = np.array([line["probabilities"] for line in lines])
    guess = np.where(chances[:, 0] > effect["thresholds"]["neg"], 0, 1)
    correct = np.array([names[c] == line["label"] for c, line in zip(guess, lines, strict=True)])
    assert last["accuracy"] == pytest.approx(correct.mean())
    sure = chances[np.arange(141), guess] >= 0.55
    assert 0 < effect["answered"] == sure.sum() < 141
    assert effect["accuracy_of_answered"] == pytest.approx(correct[sure].mean())
    for page in ("report.html", "model/README.md"):
        text = " ".join((run / page).read_text().split())
        for part in ("0.55", f"{sure.sum()} of 141"):
            assert part in text
        assert ">ece<" in text or "| ece |" in text
    assert "decisions.json" not in (plain / "model" / "README.md").read_text()


def test_all_that_loads_the_model_applies_decisions(
    runs: dict[str, Path], tmp_path: Path, no_launcher: None
) -> None:
    root = runs["ddp x2"]
    run, rows = root / "two", pd.read_csv(root / "test.csv")
    expected = [line["prediction"] for line in lines_of(run / "predictions.jsonl")]
    assert None in expected
    start(
        ["toolkit", "predict", run / "model", root / "test.csv", "--output", tmp_path / "out.csv"]
    ).succeeded()
    written = pd.read_csv(tmp_path / "out.csv")["prediction"]
    assert [None if pd.isna(cell) else cell for cell in written] == expected
    assert [line["prediction"] for line in toolkit.predict(run / "model", rows["text"])] == expected
    numbers, last = (
        toolkit.evaluate(run / "model", rows["text"], rows["label"]),
        lines_of(run / "eval.jsonl")[-1],
    )
    assert numbers["accuracy"] == pytest.approx(last["accuracy"])
    # they were tuned on the weights in model/; a checkpoint has none
    for name, has_file in (("best", False), ("model", True)):
        source = run / "model" if name == "model" else run / "checkpoints" / name
        toolkit.convert(source, tmp_path / name)
        labels = labels_of(
            load_config(toolkit.settings(model_name_or_path=str(tmp_path / name)).model)
        )
        assert (saved_decisions(str(tmp_path / name), labels) is None) is not has_file


@pytest.mark.parametrize("way", ["single", "ddp x2"])
def test_evaluate_agrees_with_the_run(way: str, runs: dict[str, Path], tmp_path: Path) -> None:
    run, out = runs["single"] / "two", tmp_path / "out"
    command = [
        "toolkit",
        "evaluate",
        run / "model",
        run.parent / "test.csv",
        "--output_dir",
        out,
        *WAYS[way],
    ]
    start(command).succeeded()
    (numbers,), last = lines_of(out / "eval.jsonl"), lines_of(run / "eval.jsonl")[-1]
    for metric in ("num_samples", "accuracy", "f1_macro"):
        assert numbers[metric] == pytest.approx(last[metric])
    mine, theirs = ([(line["label"], line["prediction"]) for line in lines_of(folder / "predictions.jsonl")]
                    for folder in (out, run))  # fmt: skip
    assert mine == theirs


def test_a_run_is_compared_with_baselines(runs: dict[str, Path]) -> None:
    for name in JOBS:
        run = runs["ddp x2"] / name
        models = json.loads((run / "baselines.json").read_text())["models"]
        last = lines_of(run / "eval.jsonl")[-1]
        assert list(models) == ["largest class", "tf-idf + logistic regression", "this model"]
        for metric in ("accuracy", "f1_macro"):
            assert models["this model"][metric]["value"] == pytest.approx(last[metric])
        assert "tf-idf + logistic regression" in (run / "report.html").read_text()


def test_a_finished_run_is_tuned_again_with_other_settings(
    runs: dict[str, Path], tiny_model: Path
) -> None:
    folder = runs["ddp x2"]
    run = folder / "two"
    weights = (run / "model" / "model.safetensors").read_bytes()
    command = ["--model_name_or_path", tiny_model, "--train_file", folder / "train.csv", "--test_file",
               folder / "test.csv", *COMMON, "--output_dir", run]  # fmt: skip
    before = saved(run)
    train(*command, *JOBS["two"], "--tune_thresholds", "precision_at_recall=0.1")
    assert saved(run)["thresholds"] != before["thresholds"]
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    train(*command)
    assert not (run / "model" / "decisions.json").exists()
    assert None not in [line["prediction"] for line in lines_of(run / "predictions.jsonl")]
