"""Promise: however a run ends, its trackers have every logged step."""

import json
import time
from pathlib import Path

import pytest

from tests.failing_worker import STEPS
from tests.runs import WAYS, recipe
from toolkit.launch import failure


@pytest.mark.multiprocess
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
def test_steps_reach_the_tracker(
    how: str, rank: str, way: str, code: int, tiny_job: list[str], tmp_path: Path
) -> None:
    settings = [*tiny_job, "--max_steps", "8", "--global_batch_size", "8", "--report_to", "tensorboard",
                "--output_dir", str(tmp_path / "run")]  # fmt: skip
    done = recipe(how, rank, *settings, *WAYS[way], script="tests/failing_worker.py")
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
    failure._close_resources()
    failure._close_resources()  # only once
    assert time.monotonic() - started < 10
    assert len(calls) == 1
