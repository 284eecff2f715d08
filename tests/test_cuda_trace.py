"""CUDA code paths without a GPU, with a CUDA build of torch, by tests/cuda_worker.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_meta_device import CLASSES, CLEAN, LONG, files, trace

__all__ = ["files"]  # a fixture
pytestmark = [
    pytest.mark.timeout(1800),  # the first import of a CUDA build reads gigabytes
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None or torch.cuda.is_available(),
        reason="needs a CUDA build of torch, and no GPU",
    ),
]
# without FGM and flex_attention: their forward passes compute gradients, which needs the driver
GATHERED = [*LONG, "--attn_implementation", "gathered"]
JOBS: dict[str, tuple[str, list[Any]]] = {
    "cls": ("cls", CLASSES),
    "cls regularized": ("cls", [*CLASSES, "--r_drop_alpha", 1, "--ema_decay", 0.9, "--loss", "focal"]),
    "cls lora": ("cls", [*CLASSES, "--lora_r", 2, "--gradient_checkpointing", "--class_weights", "balanced"]),
    "cls padding free": ("cls", [*CLASSES, "--padding_free"]),
    "cls padding free, no dropout":
        ("cls", [*CLASSES, "--padding_free", "--dropout", 0, "--max_tokens_per_batch", 300]),
    "cls unclipped": ("cls", [*CLASSES, "--max_grad_norm", 0]),
    "bigbird": ("bigbird", GATHERED),
    "bigbird full": ("bigbird", [*LONG, "--attn_implementation", "full", "--ema_decay", 0.9]),
    "title": ("title", ["--attn_implementation", "gathered"]),
    "pretrain": ("pretrain", ["--new_head", "true"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def notes(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, files: dict[str, Path]
) -> dict[str, Any]:
    jobs = {
        f"{job}, {precision}": (name, tiny_model, [*words, "--mixed_precision", precision])
        for job, (name, words) in JOBS.items()
        for precision in ("bf16", "fp16", "no")
    }
    return trace(tmp_path_factory.mktemp("cuda"), files, jobs, "tests/cuda_worker.py", 1500)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
@pytest.mark.parametrize("job", JOBS)
def test_a_step_and_an_evaluation_stay_on_cuda(
    job: str, precision: str, notes: dict[str, Any]
) -> None:
    noted = notes[f"{job}, {precision}"]
    assert noted == CLEAN, noted["error"]
