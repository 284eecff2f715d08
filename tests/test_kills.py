"""Kill -9 at any moment, start the same command again: the whole loss curve is the undisturbed one's."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults import Fault
from tests.runs import WAYS, fork, lines_of, recipe, run_of, slow_but, train, wait_for_steps
from toolkit.checkpoint.folder import complete

STEPS = 12
QUICK = (2, 9, 16, 23, 31, 40)
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def settings(tiny_model: Path, reviews: Path) -> list[str]:
    """With dropout: a resumed run draws the very numbers that the killed one would have drawn."""
    return ["--model_name_or_path", str(tiny_model), "--train_file", str(reviews), "--max_steps", str(STEPS),
            "--dropout", "0.1", "--mixed_precision", "no", "--report_to", "none", "--global_batch_size", "12",
            "--per_device_batch_size", "6", "--learning_rate", "1e-3", "--checkpoint_every", "2",
            "--eval_every", "5", "--keep_checkpoints", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Way -> the folder of a run that nobody killed."""
    root = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda way: run_of([*settings, *WAYS[way]], root / way.replace(" ", "-")))


def assert_same_run(folder: Path, expected: Path, rel: float = 1e-6, stopped: bool = False) -> None:
    """Every step once, with the same loss; the same evaluations; the same best model. A run that was `stopped` may keep
    the checkpoint that it took then, in place of one before it."""
    found, wanted = lines_of(folder / "metrics.jsonl"), lines_of(expected / "metrics.jsonl")
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=rel)
    found, wanted = lines_of(folder / "eval.jsonl"), lines_of(expected / "eval.jsonl")
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=rel)
    state = [json.loads((path / "model" / "trainer_state.json").read_text()) for path in (folder, expected)]
    assert state[0] == state[1]
    kept, known = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (folder, expected)]
    assert stopped or kept == known
    assert complete(folder / "checkpoints")[0].name == complete(expected / "checkpoints")[0].name


@pytest.mark.parametrize("event", slow_but(range(1, 64), *QUICK))
def test_inside_a_save(event: int, settings: list[str], undisturbed: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = recipe(str(event), "0", *settings, "--output_dir", folder, script="tests/kill_worker.py")
    assert killed.code == -signal.SIGKILL, killed.err[-3000:]
    train(*settings, "--output_dir", folder)
    assert_same_run(folder, undisturbed("single"))


def _kill(target: str, launcher: int, chosen: random.Random) -> None:
    """Of processes this test has started only: they are the launcher and those below it."""
    below = psutil.Process(launcher).children(recursive=True)
    workers = [child for child in below if child.name().startswith("python") and not child.children()]
    victims = {
        "one rank": [chosen.choice(workers)] if workers else [],
        "all ranks": workers,
        "the launcher": [psutil.Process(launcher)],
    }[target]
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    _, alive = psutil.wait_procs(below, timeout=30)
    for process in alive:  # a launcher that is killed cannot end its processes: they lose each other, or end here
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


def _kill_at_random(way: str, target: str, seed: int, settings: list[str], undisturbed: Runs, folder: Path) -> str:
    """What was on the screen when it was killed."""
    expected = undisturbed(way)  # made before the clock runs
    saw = _start_and_kill(way, target, seed, settings, folder)
    train(*settings, "--output_dir", folder, *WAYS[way])
    assert_same_run(folder, expected, stopped=target == "the launcher")
    return saw


def _start_and_kill(way: str, target: str, seed: int, settings: list[str], folder: Path) -> str:
    chosen = random.Random(f"{way} {target} {seed}")
    after = chosen.randrange(1, STEPS)
    with fork(["recipes/cls.py", *settings, "--output_dir", str(folder), *WAYS[way]]) as process:
        wait_for_steps(folder, after)
        time.sleep(chosen.random() * 0.2)  # a random moment of the next
        _kill(target, process.pid, chosen)
        return process.finish(60).err


TARGETS = ("one rank", "all ranks", "the launcher")


@pytest.mark.multiprocess
@pytest.mark.parametrize(("way", "target"), [("ddp x2", "one rank"), ("zero2 x2", "all ranks"),
                                             ("zero3 x2", "the launcher")])  # fmt: skip
def test_at_random(way: str, target: str, settings: list[str], undisturbed: Runs, tmp_path: Path, fault: Fault) -> None:
    saw = _kill_at_random(way, target, 0, settings, undisturbed, tmp_path / "run")
    fault(f"kill -9 of {target} ({way})", saw, "the steps since the last checkpoint; the same command goes on exactly")


CHANGES = [("zero3 x2", "single"), ("ddp x3", "zero2 x2"), ("zero2 x2", "ddp x2"), ("single", "zero1 x2"),
           ("fsdp2 x2", "ddp x2")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", ["ddp x2", "zero1 x2", "zero2 x2", "zero3 x2", "fsdp2 x2"])
def test_at_random_often(
    way: str, target: str, seed: int, settings: list[str], undisturbed: Runs, tmp_path: Path
) -> None:
    _kill_at_random(way, target, seed, settings, undisturbed, tmp_path / "run")


@pytest.mark.multiprocess
@pytest.mark.parametrize("ways", slow_but(CHANGES, CHANGES[0]), ids=" -> ".join)
def test_killed_under_one_strategy_and_resumed_under_another(
    ways: tuple[str, str], settings: list[str], tmp_path: Path
) -> None:
    """Without dropout, whose masks are each process's own."""
    way, other = ways
    same = [*settings, "--dropout", "0"]
    _start_and_kill(way, "all ranks", 0, same, tmp_path / "run")
    train(*same, "--output_dir", tmp_path / "run", *WAYS[other])
    run_of(same, tmp_path / "undisturbed")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed", rel=1e-5)
