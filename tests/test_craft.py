"""Settings of the loss, the optimizer and layers: equal losses under every launch, and after a resume."""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from tests.jobs_worker import run_jobs
from tests.runs import WAYS, lines_of, losses_of

STEPS = 6
COMMON = ["--eval_every", 3, "--dropout", 0, "--mixed_precision", "no", "--report_to", "none",
          "--learning_rate", "5e-3", "--lr_scheduler_type", "constant", "--global_batch_size", 22,
          "--per_device_batch_size", 6, "--max_eval_samples", 21]  # fmt: skip
HALF = ["--max_steps", STEPS // 2, "--checkpoint_every", STEPS // 2]
EACH = ["--max_steps", STEPS // 2, "--checkpoint_every", 1, "--keep_checkpoints", STEPS]
JOBS: dict[str, list[Any]] = {
    "weights": ["--class_weights", "balanced", "--loss", "focal", "--sampling", "sqrt", "--ema_decay", 0.6],
    "pos_weight": ["--label_column", "tags", "--problem_type", "multi_label_classification", "--pos_weight", "balanced",
                   "--loss", "focal", "--focal_gamma", 1],
    "lion": ["--optimizer", "lion", "--learning_rate", "5e-4", "--layerwise_lr_decay", 0.7, "--unfreeze_every", 2,
             "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", 2],
    "layers": ["--optimizer", "torch.optim.RMSprop", "--optimizer_args", "alpha=0.9", "--layerwise_lr_decay", 0.8,
               "--freeze_layers", 1, "--reinit_layers", 1],
    "adafactor": ["--optimizer", "adafactor"],
    "muon": ["--optimizer", "muon", "--learning_rate", "1e-3"],
    "adversarial": ["--fgm_epsilon", 0.5, "--r_drop_alpha", 1.0],
    "head": ["--freeze_layers", 2],  # FSDP2's root has all that is trained
}  # fmt: skip
# errors there: tests/training/test_optimizer.py
REFUSED = dict.fromkeys(("zero2 x2", "zero3 x2", "fsdp2 x2"), ("adafactor", "muon"))
# stopped and resumed under each way; under DDP an optimizer that ZeRO does not support
RESUMED = {"single": ("weights", "lion", "muon"), "ddp x2": ("muon",), "zero2 x2": ("weights", "lion"),
           "zero3 x2": ("weights", "lion"), "fsdp2 x2": ("weights", "lion")}  # fmt: skip
MARKS = {"ddp x2": (), "zero2 x2": (), "zero3 x2": (pytest.mark.slow,), "fsdp2 x2": (pytest.mark.slow,)}


def tried(names: Callable[[str], Iterable[str]], *ways: str) -> list[Any]:
    """Parameters (way, name) of the jobs of each way."""
    marks = {way: (pytest.mark.multiprocess, *marks) for way, marks in MARKS.items()}
    return [pytest.param(way, name, marks=marks.get(way, ())) for way in (*ways, *MARKS) for name in names(way)]


def names_under(way: str) -> list[str]:
    return [name for name in JOBS if name not in REFUSED.get(way, ())]


Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> Runs:
    """A way to start -> the folder with its runs; each way is started once."""
    folder = tmp_path_factory.mktemp("craft")
    table = pd.read_csv(reviews)
    table = table[(table["label"] == "neg") | (table.index % 5 == 0)]  # uneven
    table["tags"] = table["label"] + table["text"].str.contains("film").map({True: "|film", False: ""})
    table.to_csv(folder / "rows.csv", index=False)

    @functools.cache
    def run(way: str) -> Path:
        runs = folder / way
        data = ["--train_file", folder / "rows.csv", "--model_name_or_path", tiny_model, "--text_column", "text"]
        jobs: list[list[Any]] = []
        for name in names_under(way):
            job = ["recipes.cls", *data, *COMMON, *JOBS[name]]
            again = [f"{name} again"] if name in RESUMED[way] else []
            jobs += [[*job, "--output_dir", runs / each, *HALF] for each in again]
            if (way, name) == ("single", "weights"):
                jobs.append([*job, *EACH, "--output_dir", runs / "each step"])
            jobs += [[*job, "--output_dir", runs / each, "--max_steps", STEPS] for each in (name, *again)]
        log = run_jobs(runs, WAYS[way], jobs, 500, pages=["weights", "layers"] if way == "single" else []).err
        runs.with_suffix(".err").write_text(log, encoding="utf-8")
        return runs

    return run


@pytest.mark.parametrize(("way", "name"), tried(names_under))
def test_equal_losses_under_every_launch(way: str, name: str, runs_of: Runs) -> None:
    assert_agree(runs_of(way) / name, runs_of("single") / name)


def assert_agree(run: Path, expected: Path) -> None:
    losses = losses_of(run)
    assert len(losses) == len(set(losses)) == STEPS
    assert losses == pytest.approx(losses_of(expected), rel=1e-5)
    mine, theirs = (lines_of(folder / "eval.jsonl") for folder in (run, expected))
    assert [line["loss"] for line in mine] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)


@pytest.mark.parametrize(("way", "name"), tried(lambda way: RESUMED[way], "single"))
def test_a_resumed_run_continues_the_uninterrupted_one(way: str, name: str, runs_of: Runs) -> None:
    uninterrupted, resumed = (losses_of(runs_of(way) / run) for run in (name, f"{name} again"))
    assert resumed == pytest.approx(uninterrupted, rel=1e-6)
    mine, theirs = (lines_of(runs_of(way) / run / "eval.jsonl")[-1]["loss"] for run in (f"{name} again", name))
    assert mine == pytest.approx(theirs, rel=1e-6)


def test_uneven_classes_are_logged_and_in_the_pages(runs_of: Runs) -> None:
    run, log = runs_of("single") / "weights", runs_of("single").with_suffix(".err").read_text(encoding="utf-8")
    assert "rows of each class in train: neg " in log
    for page in ("model/README.md", "report.html"):
        assert "Loss (weighted" in (run / page).read_text(encoding="utf-8")


def test_frozen_layers_do_not_change_and_reinitialized_ones_do(runs_of: Runs, tiny_model: Path) -> None:
    model = runs_of("single") / "layers" / "model"
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model, model))
    same = {name for name in before if torch.equal(before[name], after[f"bert.{name}"])}
    trained = {name for name in before if name.startswith(("encoder.layer.1.", "pooler."))}
    assert same == set(before) - trained
    assert "RMSprop" in (model / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("way", "name"), tried(lambda _: ["lion"], "single"))
def test_layers_that_are_still_frozen_do_not_change(way: str, name: str, runs_of: Runs, tiny_model: Path) -> None:
    """Bit for bit, under every strategy. The lower layer is trained from step 5 on, the embeddings never."""
    model = runs_of(way) / name / "model"
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model, model))
    step = json.loads((model / "trainer_state.json").read_text())["global_step"]
    frozen = ("embeddings.",) if step > 4 else ("embeddings.", "encoder.layer.0.")
    trained = {name for name in before if not torch.equal(before[name], after[f"bert.{name}"])}
    assert trained == {name for name in before if not name.startswith(frozen)}
    assert "1 of 4 groups stay frozen for all 6 steps" in runs_of(way).with_suffix(".err").read_text(encoding="utf-8")


def test_the_average_is_evaluated_and_saved(runs_of: Runs) -> None:
    """Compared with the average of the weights in the checkpoints of steps 1 to 3."""
    run = runs_of("single") / "each step"
    weights = []
    for step in range(1, 4):
        weights.append(load_file(run / f"checkpoints/step-{step:08d}" / "weights.safetensors"))
    saved = load_file(run / "model" / "model.safetensors")
    for name, first in weights[0].items():
        expected = first
        for step in (2, 3):
            expected = torch.lerp(expected, weights[step - 1][name], 1 - min(0.6, (1 + step) / (10 + step)))
        torch.testing.assert_close(saved[name], expected, rtol=1e-6, atol=1e-7)
        assert name == "bert.embeddings.word_embeddings.weight" or not torch.equal(saved[name], weights[2][name])


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["zero2 x2", pytest.param("zero3 x2", marks=pytest.mark.slow)])
def test_the_average_moves_to_another_strategy(way: str, runs_of: Runs, tmp_path: Path) -> None:
    checkpoint, expected = runs_of(way) / "weights again/checkpoints/step-00000003", runs_of("single") / "weights"
    jobs = json.loads((runs_of("single") / "jobs.json").read_text(encoding="utf-8"))
    job = next(job for job in jobs if job[-3] == str(expected))
    job[-3] = tmp_path / "moved"
    run_jobs(tmp_path, [], [[*job, "--resume", checkpoint]])
    assert losses_of(tmp_path / "moved") == pytest.approx(losses_of(expected)[-3:], rel=1e-5)
    mine, theirs = (
        [line["loss"] for line in lines_of(run / "eval.jsonl") if line["step"] == STEPS][:1]
        for run in (tmp_path / "moved", expected)
    )
    assert mine == pytest.approx(theirs, rel=1e-5)
