"""A checkpoint of any strategy and number of processes goes on under any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs_worker import run_jobs
from tests.runs import MORE_WAYS, WAYS, lines_of, slow_but

ALL = {**WAYS, "zero2 x3": ["--config_file", "accelerate_configs/zero2.yaml", "--num_processes", "3"], **MORE_WAYS}
# Each goes on from the checkpoints of those before it and from its own; one process at the end from all.
# `make test` leaves the last one out.
ORDER = ["single", "zero2 x3", "ddp x2", "zero3 x2", "zero1 x2", "fsdp2 x2", "zero2 x2", "zero3 x3"]
STEPS, SAVED_AT = 6, 3


@pytest.fixture(scope="module")
def settings(tiny_model: Path, reviews: Path) -> list[str]:
    """16 steps an epoch: the checkpoint lies in the middle of one."""
    return ["--model_name_or_path", str(tiny_model), "--train_file", str(reviews), "--max_steps", str(STEPS),
            "--dropout", "0", "--mixed_precision", "no", "--report_to", "none", "--global_batch_size", "12",
            "--per_device_batch_size", "3", "--learning_rate", "1e-3", "--warmup_steps", "2",
            "--checkpoint_every", str(SAVED_AT), "--eval_every", str(STEPS)]  # fmt: skip


@pytest.fixture(scope="module")
def run_way(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[str]], Path]:
    """`run_way("ddp x2", ["single"])` -> the folder with a run that goes on from each of those ways' checkpoints. What
    each way saves is made first, with what goes on from it, by one start of the way's processes."""
    root = tmp_path_factory.mktemp("elastic")

    def folder_of(name: str) -> Path:
        return root / name.replace(" ", "-")

    def resumes(way: str, sources: list[str]) -> list[list[str]]:
        saved = {source: folder_of(source) / "source" / "checkpoints" / f"step-{SAVED_AT:08d}" for source in sources}
        return [["recipes.cls", *settings, "--resume", str(path), "--output_dir", str(folder_of(way) / source)]
                for source, path in saved.items()]  # fmt: skip

    def run(way: str, sources: list[str]) -> Path:
        for place, name in enumerate(ORDER):
            if not folder_of(name).exists():
                source = ["recipes.cls", *settings, "--output_dir", str(folder_of(name) / "source")]
                run_jobs(folder_of(name), ALL[name], [source, *resumes(name, ORDER[: place + 1])])
            if name == way:
                break
        if missing := [source for source in sources if not (folder_of(way) / source).exists()]:
            run_jobs(folder_of(way) / "more", ALL[way], resumes(way, missing))
        return folder_of(way)

    return run


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(folder / "metrics.jsonl")}


def assert_all_go_on(folder: Path, sources: list[str], expected: Path) -> None:
    for source in sources:
        actual, wanted = losses(folder / source), losses(expected)
        assert list(actual) == [4, 5, 6]
        assert actual == pytest.approx({step: wanted[step] for step in actual}, rel=1e-5), f"{source} -> {folder.name}"


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", slow_but(ORDER, *ORDER[:-1]))
def test_from_those_before_it(way: str, run_way: Callable[[str, list[str]], Path]) -> None:
    sources = ORDER[: ORDER.index(way) + 1]
    assert_all_go_on(run_way(way, sources), sources, run_way("single", []) / "source")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("way", "last"),
    [("single", ORDER[-2]), *(pytest.param(way, ORDER[-1], marks=pytest.mark.slow) for way in ORDER[:-1])],
)
def test_from_those_behind_it(way: str, last: str, run_way: Callable[[str, list[str]], Path]) -> None:
    run_way(last, [])
    sources = ORDER[ORDER.index(way) + 1 : ORDER.index(last) + 1]
    assert_all_go_on(run_way(way, sources), sources, run_way("single", []) / "source")
