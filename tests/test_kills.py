"""A run killed at any moment and started again has the loss curve of an uninterrupted one. (Promise 3.)"""

import contextlib
import itertools
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests import inputs
from tests.failing_worker import STEPS as FAILING_STEP
from tests.matrix import TINY, runs, words_of
from tests.runs import WAYS, assert_same_run, fork, recipe, slow_but, start, train, wait_for_steps
from tests.test_resume import best_step
from toolkit.checkpoint.folder import readable

STEPS = 12
# with dropout: a resumed run draws the same random numbers
SETTINGS = [*TINY, "--train_file", inputs.reviews, "--max_steps", STEPS, "--dropout", 0.1, "--global_batch_size", 12,
            "--per_device_batch_size", 6, "--learning_rate", "1e-3", "--checkpoint_every", 2, "--eval_every", 5,
            "--keep_checkpoints", 2]  # fmt: skip
# without it: its masks depend on the rank
SAME_EVERYWHERE = [*SETTINGS, "--dropout", 0]


def assert_resumed(folder: Path, expected: Path, rel: float = 1e-6, stopped: bool = False) -> None:
    """Every step and evaluation once, with the same loss; the same best model. A run that was `stopped` may have the
    checkpoint that it saved then, in place of an earlier one."""
    assert_same_run(folder, expected, rel)
    assert best_step(folder) == best_step(expected)
    saved, wanted = (sorted((run / "checkpoints").iterdir()) for run in (folder, expected))
    assert stopped or [path.name for path in saved] == [path.name for path in wanted]
    assert readable(folder / "checkpoints")[0].name == readable(expected / "checkpoints")[0].name


@pytest.mark.parametrize("event", slow_but(range(1, 200), 2, 25, 47, 80, 121, 160))
def test_inside_a_save(event: int, tmp_path: Path) -> None:
    words = [*words_of(SETTINGS), "--output_dir", tmp_path / "run"]
    killed = recipe(event, "0", *words, script="tests/failing_worker.py")
    assert killed.code == -signal.SIGKILL, killed.err[-3000:]
    train(*words)
    assert_resumed(tmp_path / "run", runs("single").run("not killed", "recipes.cls", SETTINGS))


def kill(target: str, launcher: int, chance: random.Random) -> None:
    """Kills the launcher, or ranks that it started."""
    below = psutil.Process(launcher).children(recursive=True)
    workers = [] if below else [psutil.Process(launcher)]
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name().startswith("python") and not child.children():
                workers.append(child)
    one, top = chance.choice(workers), psutil.Process(launcher)
    for victim in {"one rank": [one], "all ranks": workers, "the launcher": [top]}[target]:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    _, alive = psutil.wait_procs(below, timeout=30)
    for process in alive:  # a killed launcher cannot end them
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


# (the way of the killed run, who is killed, the seed of the moment, the way that resumes)
LAUNCHES = ["ddp x2", "zero1 x2", "zero2 x2", "zero3 x2", "fsdp2 x2"]
TARGETS = ["one rank", "all ranks", "the launcher"]
KILLS = [
    (way, target, str(seed), way)
    for way, target, seed in itertools.product(LAUNCHES, TARGETS, range(4))
]
CHANGES = [
    ("zero3 x2", "all ranks", "0", "single"), ("ddp x3", "all ranks", "0", "zero2 x2"),
    ("zero2 x2", "all ranks", "0", "ddp x2"), ("single", "all ranks", "0", "zero1 x2"),
    ("fsdp2 x2", "all ranks", "0", "ddp x2"),
]  # fmt: skip
QUICK = [("ddp x2", "one rank", "0", "ddp x2"), ("zero2 x2", "all ranks", "0", "zero2 x2"),
         ("zero3 x2", "the launcher", "0", "zero3 x2"), CHANGES[0]]  # fmt: skip


@pytest.mark.parametrize("case", slow_but([*KILLS, *CHANGES], *QUICK), ids=", ".join)
def test_at_random(case: tuple[str, str, str, str], tmp_path: Path) -> None:
    """Resumed under the same strategy, or under another."""
    way, target, seed, other = case
    settings = SETTINGS if way == other else SAME_EVERYWHERE
    chance, folder = random.Random(f"{way} {target} {seed}"), tmp_path / "run"
    words = [*words_of(settings), "--output_dir", str(folder)]
    after = chance.randrange(1, STEPS - 2)
    with fork(["recipes/cls.py", *words, *WAYS[way]]) as process:
        wait_for_steps(folder, after)
        time.sleep(chance.random() * 0.2)  # into the next step
        kill(target, process.pid, chance)
        process.finish()
    train(*words, *WAYS[other])
    if way == other:
        expected = runs(way).run("not killed", "recipes.cls", settings)
        assert_resumed(folder, expected, stopped=target == "the launcher")
    else:
        expected = runs("single").run("not killed, no dropout", "recipes.cls", settings)
        assert_resumed(folder, expected, rel=1e-5)


def test_torchrun_restarts_a_run(tmp_path: Path) -> None:
    """Its store keeps the addresses of the processes that have died."""
    launcher = "torchrun --standalone --nproc_per_node 2 --max_restarts 1".split()
    worker = ["tests/failing_worker.py", "exits once", "1"]
    words = [*words_of(SETTINGS), "--output_dir", tmp_path / "run"]
    env = {"TESTS_WITHOUT_PAGES": ""}
    done = start([*launcher, *worker, *words], 200, env).succeeded()
    assert f"step {FAILING_STEP} of {STEPS}" in done.err
    assert_resumed(tmp_path / "run", runs("ddp x2").run("not killed", "recipes.cls", SETTINGS))
