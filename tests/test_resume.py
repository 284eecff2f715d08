"""A second run in the same folder equals an uninterrupted one (promise 3); what cannot be resumed is an error, and no
file is touched (promise 5)."""

import functools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from tests import inputs, runs
from tests.checkpoint.test_folder import flip
from tests.matrix import REVIEWS
from tests.runs import digests, failed, fork, lines_of, losses_of, train
from toolkit.checkpoint import folder as folders

STEPS = 20  # 16 are an epoch
# with dropout; the best evaluation is neither the first nor the last (see `whole`)
SETTINGS = [*REVIEWS, "--max_steps", STEPS, "--dropout", 0.1, "--per_device_batch_size", 6]
SETTINGS += "--learning_rate 1e-3 --warmup_steps 4 --checkpoint_every 3 --eval_every 4".split()
SETTINGS += ["--keep_checkpoints", 20]


@functools.cache
def whole() -> Path:
    """An uninterrupted run, as planned. Tests must not write into it."""
    words = [*SETTINGS, "--output_dir"]
    run = inputs.shared("uninterrupted", lambda folder: train(*words, folder / "run")) / "run"
    steps = {folders.step_number(path) for path in folders.readable(run / "checkpoints")}
    assert steps >= {3, 6, 9, 12, 15, 18, 20, best_step(run)}
    assert 3 < best_step(run) < 18
    assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == [*range(1, STEPS + 1)]
    return run


def checkpoint(run: Path, step: int) -> Path:
    return folders.step_folder(run / "checkpoints", step)


def rewound(whole: Path, folder: Path, step: int) -> Path:
    """A copy of the run as if it was killed before its next checkpoint after `step`: its log is ahead of that."""
    shutil.copytree(whole, folder, symlinks=True)
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    last = folder / "checkpoints" / "last"
    last.unlink()
    last.symlink_to(f"step-{step:08d}")
    (folder / "report.html").unlink(missing_ok=True)
    return folder


def assert_same(actual: Path, expected: Path) -> None:
    """Each step, evaluation and prediction; the same weights, best model and links."""
    runs.assert_same_run(actual, expected, rel=1e-6)
    for weights in ("model/model.safetensors", "checkpoints/last/weights.safetensors"):
        one, other = load_file(actual / weights), load_file(expected / weights)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert best_step(actual) == best_step(expected)
    assert (actual / "checkpoints/best").readlink() == (expected / "checkpoints/best").readlink()


def best_step(run: Path) -> int:
    return int(json.loads((run / "model" / "trainer_state.json").read_text())["global_step"])


# 15: one step before the next epoch; 3: before the best step, whose model is in model/; 0: before any checkpoint
@pytest.mark.parametrize("step", [0, 3, 15, pytest.param(9, marks=pytest.mark.slow)])
def test_resumed_exactly(step: int, tmp_path: Path) -> None:
    """Also if the last line of the log is torn, and the model is gone."""
    run = rewound(whole(), tmp_path / "run", step)
    if step == 15:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:15]) + lines[15][:20])
        shutil.rmtree(run / "model")
    message = train(*SETTINGS, "--output_dir", run)
    assert (f"step {step} of {STEPS} (saved by single," in message) == (step > 0)
    assert "changed since" not in message
    assert_same(run, whole())
    assert digests(run / "checkpoints").keys() >= digests(whole() / "checkpoints").keys()


def test_the_best_model_until_the_checkpoint(tmp_path: Path) -> None:
    """Resumed before the best step: `best` and model/ are of the best step until then."""
    arguments = [*SETTINGS, *"--metric_for_best_model loss --max_steps 9 --warmup_steps 0".split()]
    train(*arguments, "--output_dir", tmp_path / "whole")
    state = folders.read_state(checkpoint(tmp_path / "whole", 6))["best"]
    target = (tmp_path / "whole" / "checkpoints" / "best").resolve()
    assert (folders.step_number(target) or 0) > 6 > state["step"]
    run = rewound(tmp_path / "whole", tmp_path / "run", 6)
    assert "is gone" not in train(*arguments, "--output_dir", run)
    assert_same(run, tmp_path / "whole")


REFUSED: dict[str, list[Any]] = {
    "global_batch_size was 12 and is 10": ["--global_batch_size", 10],
    "seed was 42 and is 43": ["--seed", 43],
    "max_length was 131 and is 50": ["--max_length", 50],
    "group_by_length was True and is False": ["--group_by_length", "false"],
    "validation_split was 0.1 and is 0.2": ["--validation_split", 0.2],
    "has taken 15 of 10 steps": ["--max_steps", 10],
    "already contains a run": ["--resume", "no"],
    "has bert.": ["--lora_r", 2],
    "train_file was": ["--train_file", inputs.uneven_reviews],
}


def test_a_refused_job_changes_nothing(tmp_path: Path) -> None:
    run = rewound(whole(), tmp_path / "run", 15)
    before = digests(run)
    for message, more in REFUSED.items():
        assert message in failed(*SETTINGS, "--output_dir", run, *more)
    assert digests(run) == before


def test_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    """Other damage: tests/checkpoint/test_folder.py."""
    run = rewound(whole(), tmp_path / "run", 18)
    flip(checkpoint(run, 18) / "weights.safetensors")
    lines = train(*SETTINGS, "--output_dir", run).splitlines()
    (line,) = [line for line in lines if "checkpoint step-00000018: " in line]
    assert ": skipped" in line
    assert_same(run, whole())
    assert folders.find_fault(checkpoint(run, 18)) == ""  # it was saved anew


def test_a_finished_run_stays_and_goes_on_when_asked_for_more(tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole(), tmp_path / "run", symlinks=True))
    before = digests(run)
    train(*SETTINGS, "--output_dir", run, "--baselines", "false")  # a feature's: it may change
    changed = {name for name, value in digests(run).items() if before.get(name) != value}
    assert not [name for name in changed if name.endswith(("safetensors", "jsonl"))]
    assert not [name for name in changed if name.startswith("checkpoints")]
    message = failed(*SETTINGS, "--output_dir", run, "--learning_rate", "3e-3")
    assert "(learning_rate was 0.001 and is 0.003)" in message
    train(*SETTINGS, "--output_dir", run, "--max_steps", 24)
    lines = lines_of(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert losses_of(run)[:20] == losses_of(whole())
    assert lines[20]["learning_rate"] > 0  # of the longer schedule


def test_early_stopping_stays_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*SETTINGS, "--output_dir", run]
    arguments += "--learning_rate 1e-12 --early_stopping_patience 1".split()
    assert "f1_macro has not improved in 1 evaluations: stopping early" in train(*arguments)
    before = [lines_of(run / name) for name in ("metrics.jsonl", "eval.jsonl")]
    assert len(before[0]) == 8
    assert "stopping early" in train(*arguments)
    assert [lines_of(run / name) for name in ("metrics.jsonl", "eval.jsonl")] == before


def test_in_the_background_the_same_bytes_are_written(tmp_path: Path) -> None:
    train(*SETTINGS, "--output_dir", tmp_path / "run", "--checkpoint_in_background")
    actual, expected = digests(tmp_path / "run" / "checkpoints"), digests(whole() / "checkpoints")
    assert actual.keys() == expected.keys()
    # it has the time, and imports in a process's first run draw from Python's random generator
    same = {name for name in expected if not name.endswith("state.json")}
    assert {name: actual[name] for name in same} == {name: expected[name] for name in same}


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk(background: str, tmp_path: Path) -> None:
    """The model fits, the moments do not."""
    run = rewound(whole(), tmp_path / "run", 15)
    largest = (checkpoint(whole(), 15) / "optimizer.safetensors").stat().st_size - 1000
    words = [*SETTINGS, "--output_dir", run, "--checkpoint_in_background", background]
    before = digests(run / "checkpoints")
    message = failed(*words, largest_file=largest)
    assert len(message.splitlines()) == 1
    assert "File too large" in message
    assert "earlier checkpoints are untouched" in message
    assert digests(run / "checkpoints") == before
    train(*words)
    assert_same(run, whole())


def test_two_at_once(tmp_path: Path) -> None:
    """The second is refused; the first continues."""
    words = [*SETTINGS, "--output_dir", tmp_path / "run"]
    command = ["tests/failing_worker.py", "stands still", "0", *words]
    with fork(command, {"TESTS_WITHOUT_PAGES": ""}) as first:
        runs.wait_until_stopped(first)
        assert "another run is writing to it" in failed(*words)
        first.send_signal(signal.SIGCONT)
        first.finish(120).succeeded()
    assert_same(tmp_path / "run", whole())
