"""Promise 1: the same losses, evaluation and predictions under every strategy and number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import MORE_WAYS, WAYS, lines_of, losses_of, recipe

STEPS = 20
# clipping bites, the schedule warms up and decays, and the two sizes divide neither each other nor the data
COMMON = ["--max_steps", STEPS, "--eval_every", 10, "--dropout", 0, "--mixed_precision", "no", "--report_to", "none",
          "--learning_rate", "3e-3", "--warmup_ratio", 0.2, "--max_grad_norm", 0.5, "--weight_decay", 0.1,
          "--per_device_eval_batch_size", 7, "--global_batch_size", 22]  # fmt: skip
ACCUMULATION = {"one micro-batch": 22, "many micro-batches": 3}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> dict[str, Path]:
    """The reference: one process, with and without accumulation."""
    folder = tmp_path_factory.mktemp("single")
    return {name: train(folder / str(size), [], size, tiny_model, reviews) for name, size in ACCUMULATION.items()}


def train(output: Path, way: list[str], per_device: int, model: Path, data: Path) -> Path:
    settings: list[Any] = ["--model_name_or_path", model, "--train_file", data, "--output_dir", output]
    finished = recipe(*way, *map(str, [*settings, *COMMON, "--per_device_batch_size", per_device]))
    assert finished.code == 0, finished.err[-3000:]
    return output


def relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def assert_same(run: Path, reference: Path) -> None:
    losses, expected = losses_of(run), losses_of(reference)
    assert len(losses) == len(expected) == STEPS
    assert max(relative(a, b) for a, b in zip(losses, expected, strict=True)) <= 1e-5
    for mine, theirs in zip(lines_of(run / "eval.jsonl"), lines_of(reference / "eval.jsonl"), strict=True):
        assert relative(mine["loss"], theirs["loss"]) <= 1e-6
        assert mine["confusion_matrix"] == theirs["confusion_matrix"]
    mine, theirs = lines_of(run / "predictions.jsonl"), lines_of(reference / "predictions.jsonl")
    assert [(line["id"], line["prediction"]) for line in mine] == [(line["id"], line["prediction"]) for line in theirs]


def test_accumulation_changes_nothing(single: dict[str, Path]) -> None:
    assert_same(single["many micro-batches"], single["one micro-batch"])
    # a run whose losses stand still would agree with anything
    losses = losses_of(single["one micro-batch"])
    assert len(set(losses)) == STEPS
    assert max(losses) - min(losses) > 0.01


@pytest.mark.multiprocess
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "single"])
def test_strategies_agree(
    way: str, accumulation: str, single: dict[str, Path], tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    run = train(tmp_path / "run", WAYS[way], ACCUMULATION[accumulation], tiny_model, reviews)
    assert_same(run, single[accumulation])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", MORE_WAYS)
def test_more_strategies_agree(
    way: str, single: dict[str, Path], tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    run = train(tmp_path / "run", MORE_WAYS[way], ACCUMULATION["many micro-batches"], tiny_model, reviews)
    assert_same(run, single["many micro-batches"])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x2", "zero3 x2"])
def test_recomputed_activations_change_nothing(
    way: str, single: dict[str, Path], tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    way_and_switch = [*WAYS[way], "--gradient_checkpointing"]
    run = train(tmp_path / "run", way_and_switch, ACCUMULATION["many micro-batches"], tiny_model, reviews)
    assert_same(run, single["many micro-batches"])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_strategy_that_needs_a_gpu_says_what_it_is_without_one(
    tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    settings = ["--model_name_or_path", tiny_model, "--train_file", reviews, "--output_dir", tmp_path / "run"]
    finished = recipe(*MORE_WAYS["fsdp2 x2"], *map(str, settings), "--max_steps", "1", "--report_to", "none")
    assert finished.code == 0, finished.err[-3000:]
    if not torch.cuda.is_available():
        assert "no GPU here: FSDP needs one, so this runs as plain data parallel" in finished.err
