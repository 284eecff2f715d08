"""Promise: a stop signal takes a checkpoint and ends cleanly, and the same command resumes; however a run ends, its
trackers have every logged step."""

import json
import os
import shlex
import signal
import sys
import time
from html import unescape
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1
from typing import Any

import psutil
import pytest

from tests import runs
from tests.failing_worker import STEPS
from tests.matrix import REVIEWS
from toolkit.launch import failure

SCRIPT = "recipes/cls.py"
SETTINGS = [*REVIEWS, "--dropout", 0.1, "--per_device_batch_size", 6, "--eval_every", 100_000]
PYTHON, TORCHRUN = [sys.executable, SCRIPT], ["torchrun", "--nproc_per_node", "2", SCRIPT]
ACCELERATE, DEEPSPEED = ["accelerate", "launch", SCRIPT], ["deepspeed", "--num_gpus", "2", SCRIPT]
DDP, ZERO3 = runs.WAYS["ddp x2"], runs.WAYS["zero3 x2"]
ONE = ["--config_file", "accelerate_configs/single.yaml"]
# name -> (words before the settings, words after them, signal, whether to the whole process group,
# exit code: other launchers have their own)
CASES: dict[str, tuple[list[str], list[str], signal.Signals, bool, int]] = {
    "python and a file, SIGTERM": (PYTHON, DDP, SIGTERM, False, 143),
    "python and a file, Ctrl-C": (PYTHON, ZERO3, SIGINT, True, 130),
    "python and a file for one process, SIGTERM": (PYTHON, ONE, SIGTERM, False, 143),
    "torchrun, SIGTERM": (TORCHRUN, [], SIGTERM, False, 1),
    "python and a file, the launcher killed": (PYTHON, DDP, SIGKILL, False, -9),
    "python, Ctrl-C": (PYTHON, [], SIGINT, False, 130),
    "python and a file, SIGUSR1": (PYTHON, ZERO3, SIGUSR1, False, 138),
    "accelerate launch, SIGTERM to all": (ACCELERATE, DDP, SIGTERM, True, -15),
    "torchrun, Ctrl-C": (TORCHRUN, [], SIGINT, True, 1),
    "accelerate launch, Ctrl-C": (ACCELERATE, DDP, SIGINT, True, -2),  # 130 in a shell
    "deepspeed, SIGTERM to all": (DEEPSPEED, [], SIGTERM, True, -15),
}


def interrupt(
    command: list[Any], folder: Path, number: signal.Signals, group: bool
) -> tuple[int, str]:
    """The exit code and standard error of a run that gets a signal after its first step, or where it stands still."""
    if command[0] != sys.executable:
        command = [sys.executable, str(Path(sys.executable).with_name(command[0])), *command[1:]]
    with runs.port_of(command[1:]), runs.fork(command[1:]) as process:
        stands = "stands still" in command
        if stands:
            runs.wait_until_stopped(process)
        else:
            runs.wait_for_steps(folder)
        below = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if group else os.kill)(process.pid, number)
        if stands:
            process.send_signal(signal.SIGCONT)
        process.finish()
        _, alive = psutil.wait_procs(below, 30)
        for one in alive:
            one.kill()
        assert alive == []
        done = process.finish()
        return done.code, done.err


def stop_line(error: str) -> str:
    (line,) = [line for line in error.splitlines() if line.startswith("stopped by ")]
    return line


@pytest.mark.parametrize("name", runs.slow_but(CASES, *list(CASES)[:5]))
def test_stop(name: str, tmp_path: Path) -> None:
    before, behind, number, group, code = CASES[name]
    folder = tmp_path / "run"
    command = [*before, *SETTINGS, "--max_steps", "4000", "--output_dir", str(folder), *behind]
    returned, error = interrupt(command, folder, number, group)
    assert returned == code, error[-3000:]
    # not for SIGTERM, which launchers also send after a failure
    is_printed = number in (SIGINT, SIGUSR1)
    assert is_printed <= error.count(": stopping after this step") <= 1, error[-3000:]
    done = len(runs.losses_of(folder))
    assert 0 < done < 4000
    assert f"after step {done} of 4000" in stop_line(error)
    assert str((folder / "checkpoints" / "last").readlink()) == f"step-{done:08d}"


def test_same_command_resumes(tmp_path: Path) -> None:
    """With dropout, the same losses as a run that was not stopped."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    words = [*SETTINGS, "--max_steps", "84", "--logging_steps", "7", "--output_dir", str(folder)]
    command = [sys.executable, "tests/failing_worker.py", "stands still", "0", *words]
    returned, error = interrupt(command, folder, SIGTERM, False)
    assert returned == 143, error[-3000:]
    done = len(runs.losses_of(folder))
    assert done == 7  # the signal is handled when losses are gathered
    again = stop_line(error).split("to continue: ")[1]
    assert shlex.split(again)[1:] == [command[1], *runs.words_of(words)]
    report = unescape((folder / "report.html").read_text(encoding="utf-8"))
    assert f"Stopped by SIGTERM after step {done} of 84" in report
    assert f"<pre>{again}</pre>" in report
    resume = [*SETTINGS, "--max_steps", "84", "--output_dir"]
    assert f"step {done} of 84" in runs.train(*resume, folder, pages=True)
    runs.train(*resume, whole)
    runs.assert_same_run(folder, whole, rel=1e-6)
    assert "Stopped by" not in (folder / "report.html").read_text(encoding="utf-8")


STOPPED_IN_EVALUATION = """
import signal
from toolkit.evaluation.outputs import Outputs
from recipes import cls
from toolkit import launch
add, added = Outputs.add, []
def add_and_stop(self, gathered):
    added.append(gathered)
    if len(added) == 2:  # within the first evaluation, between two batches
        signal.raise_signal(signal.SIGTERM)
    assert len(added) < 4
    add(self, gathered)
Outputs.add = add_and_stop
launch.run(cls.main)
"""


def test_stop_during_an_evaluation(tmp_path: Path) -> None:
    """At once, with a checkpoint; the evaluations are those of a run that was not stopped."""
    folder, whole, worker = tmp_path / "run", tmp_path / "whole", tmp_path / "worker.py"
    words = [*SETTINGS, "--eval_every", "4", "--max_steps", "8", "--per_device_batch_size", "3"]
    worker.write_text(STOPPED_IN_EVALUATION)
    env = {"PYTHONPATH": str(runs.ROOT)}
    stopped = runs.recipe(*words, "--output_dir", folder, script=str(worker), env=env)
    assert "stopped by SIGTERM after step 4 of 8" in stopped.err, stopped.err[-3000:]
    assert not (folder / "eval.jsonl").exists()
    assert (folder / "checkpoints" / "last").readlink() == Path("step-00000004")
    for each in folder, whole:
        runs.train(*words, "--output_dir", each)
    runs.assert_same_run(folder, whole, rel=1e-6)


@pytest.mark.parametrize(
    ("how", "rank", "way", "code"),
    [
        ("fails", "0", "single", 1),
        ("is interrupted twice", "0", "single", 130),
        ("fails", "1", "ddp x2", 1),
        ("is killed", "1", "ddp x2", 1),
        ("exits", "1", "ddp x2", 1),
    ],
)
def test_steps_reach_the_tracker(how: str, rank: str, way: str, code: int, tmp_path: Path) -> None:
    words = [*REVIEWS, "--max_steps", 8, "--report_to", "tensorboard", *runs.WAYS[way]]
    folder = ["--output_dir", tmp_path / "run"]
    done = runs.recipe(how, rank, *words, *folder, script="tests/failing_worker.py")
    assert done.code == code, done.err
    if how in ("is killed", "exits"):
        done.says_in_one_line("rank 1")
    (late,) = (tmp_path / "run").rglob("late")
    assert json.loads(late.read_text()) == [*range(1, STEPS + 1)]


def test_exit_waits_for_a_hanging_close_until_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_CLOSE_SECONDS", 0.2)
    calls: list[float] = []
    failure.exit_state.close = lambda: (calls.append(0.0), time.sleep(60))
    started = time.monotonic()
    for _ in range(2):  # but only once
        failure._close_resources()
    assert (len(calls), time.monotonic() - started < 10) == (1, True)
