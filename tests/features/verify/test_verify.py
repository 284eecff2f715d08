"""`toolkit verify`: the shipped recipe passes, and the fault of a wrong recipe is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, Finished, slow_but, start
from toolkit.training.verified import record_path

CLS = "recipes/cls.py"
DDP = ["--config_file", "accelerate_configs/ddp.yaml"]
BACKWARD = "accelerator.backward(step.mean(losses))  #"
LOSSES = "            losses = objective(batch, logits)"
STEPS = "    for step in run.steps(evaluate):"
WRONG: dict[str, tuple[dict[str, str], str]] = {
    "gradients": (
        {BACKWARD: BACKWARD.replace("  #", "; [p.grad.mul_(0.5) for p in model.parameters()]  #")},
        "other-micro-batches"),
    "randomness": (
        {LOSSES: f"            logits = __import__('torch').dropout(logits, 0.1, True)\n{LOSSES}"},
        "other-randomness"),
    "resumed": (
        {STEPS: f"    seen = []\n{STEPS}\n        seen.append(step)  #",
         BACKWARD: BACKWARD.replace("losses", "losses * len(seen)")},
        "ddp-resumed"),
}  # fmt: skip


def verify(recipe: Path | str, folder: Path, *words: Any) -> tuple[Finished, dict[str, Any]]:
    command = ["toolkit", "verify", recipe, "--max_steps", "3", "--output_dir", folder, *words]
    done = start([str(word) for word in command], 500, {"TESTS_WITHOUT_PAGES": ""})
    return done, json.loads((folder / "verify.json").read_text(encoding="utf-8"))


@pytest.fixture
def job(tiny_model: Path, reviews: Path) -> list[Any]:
    model = ["--model_name_or_path", tiny_model, "--train_file", reviews]
    return [*model, "--optimizer", "sgd", "--learning_rate", 0.1]


@pytest.mark.multiprocess
def test_the_shipped_recipe_passes(job: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "verify"
    done, facts = verify(CLS, folder, *DDP, "--mixed_precision", "bf16", *job)
    assert (done.code, facts["agrees"]) == (0, True), done.out + done.err
    assert [run["precision"] for run in facts["runs"]] == ["no"] * 5 + ["bf16"] * 2
    assert done.out.splitlines()[4].split()[:3] == ["ddp", "fp32", "same"]
    runs = {run["name"]: run for run in facts["runs"]}
    assert [name for name in runs if f"{name}: running" not in done.err] == []
    assert max(runs["ddp"]["differences"].values()) <= 1e-5
    numbers = runs["ddp"]["numbers"]
    assert len(numbers["loss"]) == len(set(numbers["gradient norm"].values())) == 3
    assert {"1 loss", "3 accuracy"} <= numbers["evaluation"].keys()
    assert [*runs["ddp-resumed"]["numbers"]["loss"]] == ["3"]
    assert record_path(facts["digest"], "ddp").exists()
    settings = json.loads((folder / "ddp" / "config.json").read_text())
    # of 31 samples in two processes, at most 3 at a time
    assert settings["data"]["accumulation"] == 6


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", slow_but(WRONG, "gradients", "resumed"))
def test_the_run_that_shows_a_wrong_recipe(name: str, job: list[Any], tmp_path: Path) -> None:
    """More wrong edits: tests/test_wrong_edits.py."""
    edits, shown = WRONG[name]
    text = (ROOT / CLS).read_text(encoding="utf-8")
    for before, after in edits.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "recipes" / "cls_demo.yaml", tmp_path)
    words = [*DDP, "--mixed_precision", "no", *job]
    done, facts = verify(tmp_path / "recipe.py", tmp_path / "verify", *words)
    assert done.code == 1, done.out + done.err
    wrong = [run for run in facts["runs"] if run["result"] == "NOT THE SAME"]
    assert wrong[0]["name"] == shown, done.out
    assert f"    -> {wrong[0]['reason']}\n" in done.out
    assert f"\nNOT THE SAME: {shown}" in done.out
    assert not record_path(facts["digest"], "ddp").exists()


FAILING = {
    "logs nothing": ("", [], "metrics.jsonl"),
    "hangs": ("import time\ntime.sleep(999)\n", ["--time_limit", 2], "hangs"),
    "says why": ("import sys\nsys.exit('error: no text')\n", [], "no text"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_run_that_fails(name: str, tmp_path: Path) -> None:
    """It is never said to be different."""
    text, words, reason = FAILING[name]
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text)
    done, facts = verify(recipe, tmp_path / "verify", *words)
    assert (done.code, facts["agrees"]) == (1, False)
    (run,) = facts["runs"]
    assert (run["result"], reason in run["reason"]) == ("FAILED", True)
    assert f"    -> {run['reason']}\n" in done.out
    assert "\nFAILED: one-process" in done.out
    assert "NOT THE SAME" not in done.out


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path)]
    start(["toolkit", "verify", CLS, *words]).says_in_one_line(str(tmp_path))
