"""recipes/pretrain.py: the promises on masked tokens, and that other recipes take its model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.architectures import make_architecture
from tests.jobs_worker import run_jobs
from tests.runs import MORE_WAYS, WAYS, lines_of, losses_of
from toolkit.models.to_bigbird import SparseSizes, to_bigbird

SEED, STEPS, STOPPED, RATE = 42, 7, 3, 3e-3  # 6 steps are an epoch
COMMON = ["--max_steps", STEPS, "--eval_every", STEPS, "--dropout", 0, "--mixed_precision", "no", "--report_to", "none",
          "--seed", SEED, "--global_batch_size", 11, "--per_device_batch_size", 3, "--per_device_eval_batch_size", 5,
          "--learning_rate", RATE, "--lr_scheduler_type", "constant", "--weight_decay", 0,
          "--max_grad_norm", 0, "--max_length", 48]  # fmt: skip
PROBABILITY = "0.4:0.2"  # of a whole run: the stopped one has one
SEVERAL = ["BERT", "RoBERTa", "XLM-R", "ModernBERT"]
Runs = dict[str, Path]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, reviews: Path) -> list[str]:
    return list(pd.read_csv(reviews)["text"][:80])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, texts: list[str], sharp_model: Path) -> Runs:
    """Small encoders with a head, and a BigBird made from the BERT."""
    root = tmp_path_factory.mktemp("masked")
    made = {name: make_architecture(name, root / name, texts) for name in SEVERAL}
    to_bigbird(str(made["BERT"]), root / "BigBird", SparseSizes(128, 4, 1))
    return {**made, "BigBird": root / "BigBird"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> list[Any]:
    """64 texts to train on and 16 to evaluate, a line each."""
    folder = tmp_path_factory.mktemp("texts")
    for name, some in (("train", texts[:64]), ("validation", texts[64:])):
        (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in some), encoding="utf-8")
    return ["--train_file", folder / "train.txt", "--validation_file", folder / "validation.txt"]


@pytest.fixture(scope="module")
def jobs(models: Runs, data: list[Any]) -> dict[str, list[Any]]:
    words = {name: [] if name == "XLM-R" else ["--whole_word_mask", "true"] for name in models}
    jobs = {name: ["--model_name_or_path", models[name], *data, *COMMON, "--mlm_probability",
                   0.3 if name == "BERT" else PROBABILITY, *words[name]] for name in models}  # fmt: skip
    jobs["RoBERTa"] += ["--gradient_checkpointing", "true"]
    return jobs


def run_all(root: Path, way: list[str], jobs: dict[str, list[Any]], **more: Any) -> Runs:
    """Each job in a folder of its name, all of them in one group of processes."""
    folders = {name: root / name for name in jobs}
    words = [["recipes.pretrain", *job, "--output_dir", folders[name]] for name, job in jobs.items()]
    run_jobs(root, way, words, seconds=240, **more)
    return folders


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory, jobs: dict[str, list[Any]]) -> Runs:
    """The BERT's is stopped on the way."""
    stopped = [*jobs["BERT"], "--max_steps", STOPPED, "--checkpoint_every", STOPPED]
    return run_all(tmp_path_factory.mktemp("zero3"), WAYS["zero3 x2"], jobs | {"BERT": stopped})


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, jobs: dict[str, list[Any]], zero3: Runs) -> Runs:
    """The references, one process, and a run that goes on from what ZeRO-3 left."""
    root = tmp_path_factory.mktemp("single")
    shutil.copytree(zero3["BERT"], root / "resumed", symlinks=True)
    resumed = [*jobs["BERT"], "--checkpoint_every", STEPS, "--per_device_batch_size", 11]
    return run_all(root, [], {**jobs, "resumed": resumed}, pages=True)


def assert_same(run: Path, reference: Path, steps: int = STEPS) -> None:
    losses, expected = losses_of(run), losses_of(reference)
    assert len(losses) == steps
    assert losses == pytest.approx(expected[:steps], rel=1e-5)
    if steps == STEPS:
        (mine, theirs) = (lines_of(folder / "eval.jsonl")[-1] for folder in (run, reference))
        assert (mine["num_samples"], mine["masked_tokens"]) == (16, theirs["masked_tokens"])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["masked_accuracy"] == pytest.approx(theirs["masked_accuracy"], abs=1e-9)
        rows = [[line["id"] for line in lines_of(folder / "predictions.jsonl")] for folder in (run, reference)]
        assert rows == [list(range(16))] * 2


# ---- promise 1


def test_the_references_could_differ(single: Runs) -> None:
    for name in ("BERT", "BigBird"):
        assert np.ptp(losses_of(single[name])) > 0.1
        assert lines_of(single[name] / "eval.jsonl")[-1]["masked_tokens"] > 30


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [*SEVERAL, "BigBird"])
def test_sharded_parameters_agree(name: str, zero3: Runs, single: Runs) -> None:
    assert_same(zero3[name], single[name], STOPPED if name == "BERT" else STEPS)


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", [*WAYS.keys() - {"single", "zero3 x2"}, "zero3 x3", "fsdp2 x3"])
def test_strategies_agree(way: str, jobs: dict[str, list[Any]], single: Runs, tmp_path: Path) -> None:
    names = ("BERT", "ModernBERT") if way in ("fsdp2 x2", "ddp x2") else ("BERT",)
    for name, run in run_all(tmp_path, {**WAYS, **MORE_WAYS}[way], {name: jobs[name] for name in names}).items():
        assert_same(run, single[name])
