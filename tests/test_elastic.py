"""A checkpoint of any strategy and world size resumes under any other. (Promise 4.)"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs_worker import run_jobs
from tests.runs import MORE_WAYS, WAYS, lines_of, losses_of, slow_but

ALL = {
    **WAYS,
    "zero2 x3": ["--config_file", "accelerate_configs/zero2.yaml", "--num_processes", "3"],
    **MORE_WAYS,
}
# Each resumes from its own checkpoint and those before it, in another test from those after it.
ORDER = ["single", "zero2 x3", "ddp x2", "zero3 x2", "zero1 x2", "fsdp2 x2", "zero2 x2", "zero3 x3"]
STEPS, SAVED_AT = 6, 3


@pytest.fixture(scope="module")
def settings(tiny_job: list[str]) -> list[str]:
    """An epoch has 16 steps: the checkpoint is in the middle of one."""
    return [*tiny_job, "--max_steps", str(STEPS), "--global_batch_size", "12", "--per_device_batch_size", "3",
            "--learning_rate", "1e-3", "--warmup_steps", "2", "--checkpoint_every", str(SAVED_AT),
            "--eval_every", str(STEPS)]  # fmt: skip


@pytest.fixture(scope="module")
def run_way(
    settings: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, list[str]], Path]:
    """`run_way("ddp x2", ["single"])` -> the folder with a run resumed from each of those ways' checkpoints. Each way
    starts once, for its checkpoint and all runs that resume from earlier ones."""
    root = tmp_path_factory.mktemp("elastic")

    def folder_of(name: str) -> Path:
        return root / name.replace(" ", "-")

    def resumes(way: str, sources: list[str]) -> list[list[str]]:
        saved = {
            source: folder_of(source) / "source" / "checkpoints" / f"step-{SAVED_AT:08d}"
            for source in sources
        }
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


def assert_all_resume(
    way: str, sources: list[str], run_way: Callable[[str, list[str]], Path]
) -> None:
    folder, expected = run_way(way, sources), losses_of(run_way("single", []) / "source")[SAVED_AT:]
    for source in sources:
        assert [line["step"] for line in lines_of(folder / source / "metrics.jsonl")] == [4, 5, 6]
        assert losses_of(folder / source) == pytest.approx(expected, rel=1e-5), f"{source} -> {way}"


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", slow_but(ORDER, *ORDER[:-1]))
def test_from_those_before_it(way: str, run_way: Callable[[str, list[str]], Path]) -> None:
    assert_all_resume(way, ORDER[: ORDER.index(way) + 1], run_way)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("way", "last"),
    [
        ("single", ORDER[-2]),
        *(pytest.param(way, ORDER[-1], marks=pytest.mark.slow) for way in ORDER[:-1]),
    ],
)
def test_from_those_after_it(
    way: str, last: str, run_way: Callable[[str, list[str]], Path]
) -> None:
    run_way(last, [])
    assert_all_resume(way, ORDER[ORDER.index(way) + 1 : ORDER.index(last) + 1], run_way)
