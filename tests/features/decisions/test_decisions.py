"""Tuned decisions in whole runs: the same under every launch, kept with the model, followed by whatever reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import toolkit
from tests.jobs_worker import run_jobs
from tests.runs import WAYS, lines_of, start, train
from tests.test_jobs import write_rows
from toolkit.evaluation.answers import labels_of
from toolkit.features.decisions.decisions import saved_decisions
from toolkit.pretrained import load_config

COMMON = ["--max_steps", 8, "--eval_every", 2, "--checkpoint_every", 4, "--global_batch_size", 20, "--dropout", 0,
          "--per_device_batch_size", 6, "--learning_rate", "1e-2", "--report_to", "none", "--mixed_precision", "no",
          "--metric_for_best_model", "loss"]  # fmt: skip
JOBS = {
    "plain": [],
    "two": ["--tune_thresholds", "cost=1:4", "--positive_class", "neg", "--calibrate", "--abstain_below", "0.55"],
    "several": ["--tune_thresholds", "f1", "--calibrate"],
}


def jobs(folder: Path, model: Path, reviews: Path) -> list[list[Any]]:
    folder.mkdir()
    table = pd.read_csv(reviews)
    table[:70].to_csv(folder / "train.csv", index=False)
    table[70:].to_csv(folder / "test.csv", index=False)
    several = write_rows(folder / "several.jsonl", "multi-label")
    found = []
    for name, settings in JOBS.items():
        data = ["--train_file", several] if name == "several" else ["--train_file", folder / "train.csv"]
        data += [] if name == "several" else ["--test_file", folder / "test.csv"]
        found.append(["recipes.cls", "--model_name_or_path", model, *data, *COMMON, *settings, "--output_dir",
                      folder / name])  # fmt: skip
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> dict[str, Path]:
    """The folder of each way; under two processes each job is typed a second time, when it has finished."""
    root = tmp_path_factory.mktemp("decisions")
    found = {}
    for way, again in (("single", 1), ("ddp x2", 2)):
        folder = found[way] = root / way
        run_jobs(root / f"{way} jobs", WAYS[way], again * jobs(folder, tiny_model, reviews), pages=True)
    return found


def saved(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "model" / "decisions.json").read_text()))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["two", "several"])
def test_the_same_under_every_launch_and_when_resumed_at_the_end(name: str, runs: dict[str, Path]) -> None:
    one, two = runs["single"] / name, runs["ddp x2"] / name
    assert saved(one)["temperature"] != 1
    assert saved(two)["temperature"] == pytest.approx(saved(one)["temperature"], rel=1e-3)
    assert saved(two)["thresholds"] == pytest.approx(saved(one)["thresholds"], abs=1e-4)
    assert saved(two)["step"] == saved(one)["step"]
    mine, theirs = (lines_of(run / "predictions.jsonl") for run in (two, one))
    assert [line["prediction"] for line in mine] == [line["prediction"] for line in theirs]
    for step in ("loss", "accuracy", "f1_macro"):
        assert lines_of(two / "eval.jsonl")[-1][step] == pytest.approx(lines_of(one / "eval.jsonl")[-1][step], rel=1e-5)


@pytest.mark.multiprocess
def test_the_test_rows_are_judged_with_and_without(runs: dict[str, Path]) -> None:
    run, plain = runs["single"] / "two", runs["single"] / "plain"
    last, without = (lines_of(folder / "eval.jsonl")[-1] for folder in (run, plain))
    assert (last["split"], last["num_samples"]) == ("test", 141)
    assert "decisions" not in without
    assert not (plain / "model" / "decisions.json").exists()
    found = last.pop("decisions")
    assert last["loss"] == without["loss"]
    assert found["before"] | without == without | {name: found["before"][name] for name in ("ece", "brier", "bins")}
    assert {name: last[name] for name in ("accuracy", "f1_macro")} == {
        name: found["after"][name] for name in ("accuracy", "f1_macro")
    }
    lines, names = lines_of(run / "predictions.jsonl"), ("neg", "pos")
    chances = np.array([line["probabilities"] for line in lines])
    guess = np.where(chances[:, 0] > found["thresholds"]["neg"], 0, 1)
    right = np.array([names[place] == line["label"] for place, line in zip(guess, lines, strict=True)])
    assert last["accuracy"] == pytest.approx(right.mean())
    sure = chances[np.arange(141), guess] >= 0.55
    assert [line["prediction"] for line in lines] == [
        names[place] if known else None for place, known in zip(guess, sure, strict=True)
    ]
    assert 0 < found["answered"] == sure.sum() < 141
    assert found["accuracy_of_answered"] == pytest.approx(right[sure].mean())
    assert sum(count for count, _, _ in found["after"]["bins"]) == 141
    for page in ("report.html", "model/README.md"):
        text = " ".join((run / page).read_text().split())
        assert f"below 0.55, none is given: {sure.sum()} of 141 are answered" in text
        assert "Expected calibration error" in text
    assert "<b>Reliability</b>" in (run / "report.html").read_text()
    assert "decisions.json" not in (plain / "model" / "README.md").read_text()


@pytest.mark.multiprocess
def test_whatever_reads_the_model_follows_it(runs: dict[str, Path], tmp_path: Path, no_launcher: None) -> None:
    root = runs["ddp x2"]
    run, rows = root / "two", pd.read_csv(root / "test.csv")
    known = [line["prediction"] for line in lines_of(run / "predictions.jsonl")]
    assert None in known
    start(["toolkit", "predict", run / "model", root / "test.csv", "--output", tmp_path / "out.csv"]).succeeded()
    written = pd.read_csv(tmp_path / "out.csv")["prediction"]
    assert [None if pd.isna(cell) else cell for cell in written] == known
    found = toolkit.predict(run / "model", rows["text"])
    assert [line["prediction"] for line in found] == known
    numbers, last = toolkit.evaluate(run / "model", rows["text"], rows["label"]), lines_of(run / "eval.jsonl")[-1]
    assert numbers["accuracy"] == pytest.approx(last["accuracy"])
    # a conversion keeps the file of the same weights, and of no others
    for name, there in (("best", True), ("model", True), ("step-00000004", saved(run)["step"] == 4)):
        source = run / "model" if name == "model" else run / "checkpoints" / name
        toolkit.convert(source, tmp_path / name)
        labels = labels_of(load_config(toolkit.settings(model_name_or_path=str(tmp_path / name)).model))
        assert (saved_decisions(str(tmp_path / name), labels) is None) is not there


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["two", "several"])
def test_evaluate_judges_a_file_as_the_run_judged_it(
    name: str, runs: dict[str, Path], tmp_path: Path, no_launcher: None
) -> None:
    """The same numbers and predictions, in two processes too, whose rows do not divide by two."""
    run = runs["single"] / name
    if name == "two":
        rows = run.parent / "test.csv"
    else:  # the run held some rows back: those
        every = (run.parent / "several.jsonl").read_text().splitlines()
        rows = tmp_path / "rows.jsonl"
        rows.write_text("\n".join(every[line["id"]] for line in lines_of(run / "predictions.jsonl")))
    last, mine = lines_of(run / "eval.jsonl")[-1], lines_of(run / "predictions.jsonl")
    for way in ("single", "ddp x2"):
        out = tmp_path / way
        start(["toolkit", "evaluate", run / "model", rows, "--output_dir", out, *WAYS[way]]).succeeded()
        found, theirs = lines_of(out / "eval.jsonl"), lines_of(out / "predictions.jsonl")
        assert len(found) == 1
        assert found[0]["num_samples"] == last["num_samples"]
        for metric in ("accuracy", "f1_macro"):
            assert found[0][metric] == pytest.approx(last[metric])
        for own, other in zip(mine, theirs, strict=True):
            assert (own["label"], own["prediction"]) == (other["label"], other["prediction"])
        assert f"on the {len(mine)} samples of {rows.name}" in (out / "report.html").read_text()
    assert start(["toolkit", "evaluate", run / "model", rows, "--output_dir", out]).code == 1
    (out / "mine.txt").touch()
    again = start(["toolkit", "evaluate", run / "model", rows, "--output_dir", out, "--overwrite"])
    assert "mine.txt" not in again.err
    assert (again.code, "--overwrite" in again.err) == (1, True)


@pytest.mark.multiprocess
def test_a_run_is_set_beside_baselines(runs: dict[str, Path]) -> None:
    for name in JOBS:
        run = runs["ddp x2"] / name
        found, last = json.loads((run / "baselines.json").read_text()), lines_of(run / "eval.jsonl")[-1]
        models = found["models"]
        assert list(models) == ["largest class", "tf-idf + logistic regression", "this model"]
        assert (
            found["train"]
            == found["trained_on"]
            == json.loads((run / "config.json").read_text())["data"]["samples"]["train"]
        )
        for metric in ("accuracy", "f1_macro"):
            assert models["this model"][metric]["value"] == pytest.approx(last[metric])
            for own in models.values():
                assert own[metric]["low"] <= own[metric]["value"] <= own[metric]["high"]
        assert "tf-idf + logistic regression" in (run / "report.html").read_text()


@pytest.mark.multiprocess
def test_a_finished_run_is_tuned_otherwise_by_the_same_command(
    runs: dict[str, Path], tiny_model: Path, reviews: Path
) -> None:
    folder = runs["ddp x2"]
    *plain, where, _ = next(job[1:] for job in jobs(folder / "more", tiny_model, reviews) if job[-1].name == "two")
    plain = [str(word).replace(str(folder / "more"), str(folder)) for word in plain]
    weights = (folder / "two" / "model" / "model.safetensors").read_bytes()
    plain[plain.index("cost=1:4")] = "f1"
    said = train(*plain, where, folder / "two")
    assert "thresholds from the validation rows: neg 0." in said
    assert saved(folder / "two")["asked"]["tune_thresholds"] == "f1"
    assert (folder / "two" / "model" / "model.safetensors").read_bytes() == weights
    start_of = plain.index("--tune_thresholds")
    train(*plain[:start_of], where, folder / "two")
    assert not (folder / "two" / "model" / "decisions.json").exists()
    assert None not in [line["prediction"] for line in lines_of(folder / "two" / "predictions.jsonl")]
