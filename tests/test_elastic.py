"""A checkpoint of any strategy and number of processes goes on under any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs_worker import run_jobs
from tests.runs import MORE_WAYS, WAYS, lines_of, recipe

ALL = {**WAYS, "zero2 x3": ["--config_file", "accelerate_configs/zero2.yaml", "--num_processes", "3"], **MORE_WAYS}
MATRIX = ["single", "ddp x2", "zero1 x2", "zero2 x2", "zero2 x3", "zero3 x2", "zero3 x3", "fsdp2 x2"]
STEPS, SAVED_AT = 6, 3


@pytest.fixture(scope="module")
def settings(tiny_model: Path, reviews: Path) -> list[str]:
    """16 steps an epoch: the checkpoint lies in the middle of one."""
    return ["--model_name_or_path", str(tiny_model), "--train_file", str(reviews), "--max_steps", str(STEPS),
            "--dropout", "0", "--mixed_precision", "no", "--report_to", "none", "--global_batch_size", "12",
            "--per_device_batch_size", "3", "--learning_rate", "1e-3", "--warmup_steps", "2",
            "--checkpoint_every", str(SAVED_AT), "--eval_every", str(STEPS)]  # fmt: skip


@pytest.fixture(scope="module")
def sources(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Way -> the folder of an undisturbed run under it."""
    root = tmp_path_factory.mktemp("sources")
    found = {}
    for way in MATRIX:
        found[way] = root / way.replace(" ", "-")
        finished = recipe(*settings, "--output_dir", found[way], *ALL[way])
        assert finished.code == 0, finished.err[-3000:]
    return found


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(folder / "metrics.jsonl")}


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", MATRIX)
def test_matrix(way: str, settings: list[str], sources: dict[str, Path], tmp_path: Path) -> None:
    jobs, targets = [], {}
    for source, folder in sources.items():
        targets[source] = tmp_path / source.replace(" ", "-")
        saved = folder / "checkpoints" / f"step-{SAVED_AT:08d}"
        jobs.append([*settings, "--output_dir", str(targets[source]), "--resume", str(saved)])
    run_jobs(tmp_path, ALL[way], [["recipes.cls", *job] for job in jobs])
    expected = losses(sources["single"])
    for source, folder in targets.items():
        found = losses(folder)
        assert list(found) == [4, 5, 6]
        for step, loss in found.items():
            assert loss == pytest.approx(expected[step], rel=1e-5), f"{source} -> {way}, step {step}"
