"""Resuming across strategies, beyond tests/test_elastic.py: LoRA and bf16. (Promises 3 and 4.)"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.jobs_worker import run_jobs
from tests.runs import WAYS, Finished, lines_of, losses_of, slow_but
from toolkit.checkpoint import folder as folders

SAVED_AT, STEPS = 3, 6


@pytest.fixture(scope="module")
def settings(tiny_model: Path, reviews: Path) -> list[Any]:
    return ["--model_name_or_path", tiny_model, "--train_file", reviews, "--max_steps", STEPS, "--dropout", 0,
            "--report_to", "none", "--global_batch_size", 12, "--per_device_batch_size", 3, "--learning_rate", "1e-3",
            "--checkpoint_every", SAVED_AT, "--eval_every", STEPS, "--keep_checkpoints", 9]  # fmt: skip


def run(jobs: list[list[Any]], way: str, folder: Path) -> Finished:
    root = folder / f"jobs-{way.replace(' ', '-')}-{len(list(folder.iterdir()))}"
    return run_jobs(root, WAYS[way], [["recipes.cls", *job] for job in jobs])


def saved(folder: Path, step: int = SAVED_AT) -> Path:
    return folders.step_folder(folder / "checkpoints", step)


def assert_resumed(actual: Path, expected: Path, rel: float) -> None:
    assert [line["step"] for line in lines_of(actual / "metrics.jsonl")] == list(
        range(SAVED_AT + 1, STEPS + 1)
    )
    assert losses_of(actual) == pytest.approx(losses_of(expected)[SAVED_AT:], rel=rel)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "way", slow_but(["zero3 x2", "ddp x2", "zero1 x2", "zero2 x2"], "zero3 x2")
)
def test_lora(way: str, settings: list[Any], tmp_path: Path) -> None:
    """One process -> this way -> one process; checkpoints omit the base model's weights."""
    common = [*settings, "--lora_r", 4, "--mixed_precision", "no", "--learning_rate", "1e-2"]
    one, many = tmp_path / "one", tmp_path / "many"
    run([[*common, "--output_dir", one]], "single", tmp_path)
    run([[*common, "--output_dir", many],
         [*common, "--output_dir", tmp_path / "one-to-many", "--resume", saved(one)],
         [*common, "--output_dir", tmp_path / "many-to-many", "--resume", saved(many)]], way, tmp_path)  # fmt: skip
    run(
        [[*common, "--output_dir", tmp_path / "many-to-one", "--resume", saved(many)]],
        "single",
        tmp_path,
    )
    assert max(losses_of(one)) - min(losses_of(one)) > 0.01
    for name in ("one-to-many", "many-to-many", "many-to-one"):
        assert_resumed(tmp_path / name, one, 1e-5)
    for folder in (one, many):
        weights = load_file(saved(folder) / folders.WEIGHTS_FILE)
        excluded = folders.read_state(saved(folder))["excluded"]
        assert weights
        assert all(".lora_" in name or ".modules_to_save." in name for name in weights)
        assert any("word_embeddings" in name for name in excluded)
        base = sum(4 * math.prod(shape) for shape in excluded.values())
        assert sum(path.stat().st_size for path in saved(folder).glob("*.safetensors")) < base


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["zero2 x2", "zero3 x2", "fsdp2 x2"])
def test_bf16(way: str, settings: list[Any], tmp_path: Path) -> None:
    """Exactly under the same strategy, closely from autocast's fp32 weights to sharded bf16 ones. Saves fp32."""
    common = [*settings, "--mixed_precision", "bf16"]
    run([[*common, "--output_dir", tmp_path / "ddp"]], "ddp x2", tmp_path)
    jobs = [[*common, "--output_dir", tmp_path / "zero"],
            [*common, "--output_dir", tmp_path / "same", "--resume", saved(tmp_path / "zero")],
            [*common, "--output_dir", tmp_path / "across", "--resume", saved(tmp_path / "ddp")]]  # fmt: skip
    run(jobs, way, tmp_path)
    for name in ("ddp", "zero", "same"):
        assert folders.read_state(saved(tmp_path / name, STEPS))["mixed_precision"] == "bf16"
    models = [
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("ddp", "zero")
    ]
    for name, expected in models[0].items():
        assert models[1][name].dtype == expected.dtype == torch.float32
        # a step moves a weight by 1e-3
        torch.testing.assert_close(models[1][name], expected, rtol=0, atol=6 * 1e-3)
    assert_resumed(tmp_path / "same", tmp_path / "zero", 1e-6)
    assert_resumed(tmp_path / "across", tmp_path / "ddp", 2e-2)
    masters = load_file(saved(tmp_path / "zero", STEPS) / folders.WEIGHTS_FILE)
    model = load_file(tmp_path / "zero/model/model.safetensors")
    # fp32, unrounded
    assert all(torch.equal(tensor, masters[name]) for name, tensor in model.items())
    assert json.loads((tmp_path / "zero/model/config.json").read_text())["dtype"] == "float32"
