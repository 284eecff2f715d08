"""A run killed at any moment and started again has the loss curve of an uninterrupted one. (Promise 3.)"""

import contextlib
import functools
import itertools
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import WAYS, assert_same_run, fork, recipe, run_of, slow_but, train, wait_for_steps
from tests.test_resume import best_step
from toolkit.checkpoint.folder import readable

STEPS = 12
QUICK = (2, 25, 47, 80, 121, 160)
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def settings(tiny_job: list[str]) -> list[str]:
    """With dropout: a resumed run draws the same random numbers."""
    return [*tiny_job, "--max_steps", str(STEPS), "--dropout", "0.1", "--global_batch_size", "12",
            "--per_device_batch_size", "6", "--learning_rate", "1e-3", "--checkpoint_every", "2", "--eval_every", "5",
            "--keep_checkpoints", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def baseline(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Way -> the folder of an uninterrupted run."""
    root = tmp_path_factory.mktemp("baseline")
    return functools.cache(
        lambda way: run_of([*settings, *WAYS[way]], root / way.replace(" ", "-"))
    )


def assert_resumed(folder: Path, expected: Path, rel: float = 1e-6, stopped: bool = False) -> None:
    """Every step and evaluation once, with the same loss; the same best model. A run that was `stopped` may have the
    checkpoint that it saved then, in place of an earlier one."""
    assert_same_run(folder, expected, rel)
    assert best_step(folder) == best_step(expected)
    checkpoints = [
        sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (folder, expected)
    ]
    assert stopped or checkpoints[0] == checkpoints[1]
    assert readable(folder / "checkpoints")[0].name == readable(expected / "checkpoints")[0].name


@pytest.mark.parametrize("event", slow_but(range(1, 200), *QUICK))
def test_inside_a_save(event: int, settings: list[str], baseline: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = recipe(
        str(event), "0", *settings, "--output_dir", folder, script="tests/kill_worker.py"
    )
    assert killed.code == -signal.SIGKILL, killed.err[-3000:]
    train(*settings, "--output_dir", folder)
    assert_resumed(folder, baseline("single"))


def _kill(target: str, launcher: int, chance: random.Random) -> None:
    """Kills the launcher, or ranks that it started."""
    below = psutil.Process(launcher).children(recursive=True)
    workers = []
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name().startswith("python") and not child.children():
                workers.append(child)
    victims = {
        "one rank": [chance.choice(workers)] if workers else [],
        "all ranks": workers,
        "the launcher": [psutil.Process(launcher)],
    }[target]
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    _, alive = psutil.wait_procs(below, timeout=30)
    for process in alive:  # a killed launcher cannot end them
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


def _start_and_kill(way: str, target: str, seed: int, settings: list[str], folder: Path) -> str:
    chance = random.Random(f"{way} {target} {seed}")
    after = chance.randrange(1, STEPS - 2)
    with fork(["recipes/cls.py", *settings, "--output_dir", str(folder), *WAYS[way]]) as process:
        wait_for_steps(folder, after)
        time.sleep(chance.random() * 0.2)  # into the next step
        _kill(target, process.pid, chance)
        return process.finish(60).err


KILLS = list(itertools.product(["ddp x2", "zero1 x2", "zero2 x2", "zero3 x2", "fsdp2 x2"],
                               ["one rank", "all ranks", "the launcher"], range(4)))  # fmt: skip
QUICK_KILLS = [
    ("ddp x2", "one rank", 0),
    ("zero2 x2", "all ranks", 0),
    ("zero3 x2", "the launcher", 0),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize("kill", slow_but(KILLS, *QUICK_KILLS), ids=str)
def test_at_random(kill: Any, settings: list[str], baseline: Runs, tmp_path: Path) -> None:
    way, target, seed = kill
    expected, folder = baseline(way), tmp_path / "run"
    _start_and_kill(way, target, seed, settings, folder)
    train(*settings, "--output_dir", folder, *WAYS[way])
    assert_resumed(folder, expected, stopped=target == "the launcher")


CHANGES = [("zero3 x2", "single"), ("ddp x3", "zero2 x2"), ("zero2 x2", "ddp x2"), ("single", "zero1 x2"),
           ("fsdp2 x2", "ddp x2")]  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.parametrize("ways", slow_but(CHANGES, CHANGES[0]), ids=" -> ".join)
def test_killed_and_resumed_under_another_strategy(
    ways: tuple[str, str], settings: list[str], tmp_path: Path
) -> None:
    """Without dropout: its masks depend on the rank."""
    way, other = ways
    same = [*settings, "--dropout", "0"]
    _start_and_kill(way, "all ranks", 0, same, tmp_path / "run")
    train(*same, "--output_dir", tmp_path / "run", *WAYS[other])
    run_of(same, tmp_path / "baseline")
    assert_resumed(tmp_path / "run", tmp_path / "baseline", rel=1e-5)
